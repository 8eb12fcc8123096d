"""How many programs of the models of these tests the checker proves: the table in docs/models.md.

``python tests/support/judges/certified_table.py FILE [set ...]`` plans, writes and judges each program, a line of JSON each into
FILE, and goes on where FILE ends. Then it prints the table, which ``--write`` puts into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.models import bundled_models, load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan_file.plan_file import Plan
from autopar.planning import make_plan
from autopar.program.build import prove_program
from support.models.further_families import REFUSED, further_families
from support.models.model_families import families
from support.models.small_models import cases, long_cases, make_case, routed_cases
from support.models.unseen.catalog import specimen as unseen_specimen
from support.models.unseen.catalog import unseen
from support.models.zoo import catalog as zoo
from support.models.zoo_index import catalog as zoo_index
from support.plans.drawn_candidates import drawn_candidate
from support.plans.sequence_sharding import sequence_plan

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
Specimen = tuple[nn.Module, dict[str, Any]]
FORCES: Mapping[str, str] = {
    "free choice": "",
    "dp=2,tp=2": "dp=2,tp=2",
    "tp=4": "tp=4",
    "experts": "dp=2,ep=2",
    "ZeRO 3, micro-batches": "dp=2,tp=2,zero=3,micro=2",
    "1f1b": "pp=2,dp=2,micro=1,schedule=1f1b",
    "gpipe": "pp=2,dp=2,micro=1,schedule=gpipe",
    "interleaved": "pp=2,dp=2,micro=1,virtual=2",
    "zb-h1": "pp=2,dp=2,micro=1,schedule=zb-h1",
    "recompute all": "dp=2,tp=2,pp=1,zero=1,micro_batches=2,recompute=full,zero_group=0,sequence_parallel=1",
    "recompute some": "dp=2,tp=2,pp=1,zero=2,micro_batches=1,recompute=selective,zero_group=0,sequence_parallel=1",
    "offload": "dp=4,tp=2,offload_optimizer=cpu",
}
"""Kinds of plans, in the words of ``--force``."""
CONTEXT = {"context, ring": "ring", "context, rows": "rows", "context, all-to-all": "exchange"}
PLANS = (*FORCES, *CONTEXT, "fp8", "drawn")
"""``drawn`` are placements that no solver chose."""
FEW = ("free choice", "dp=2,tp=2", "ZeRO 3, micro-batches", "1f1b", "recompute all", "drawn")
"""Kinds of plans of models that are no families."""
CLUSTERS = {
    "llama3-405b": "dgx-h100:2048", "deepseek-v3": "dgx-h100:256", "mixtral-8x22b": "dgx-h100:32", "llama3-70b": "dgx-h100:16"
}  # fmt: skip
"""Of bundled models whose free choice is planned on more than a node; of all others 8 H100."""
TITLES = ("families", "small", "bundled", "written", "packages", "unseen")
"""The sets of models, in the order of the table."""
CERTIFIED, REFUSED_BY_CHECKER, NO_PROGRAM = "certified", "refused", "no program"


def sets() -> dict[str, tuple[Sequence[str], Callable[[str], Specimen]]]:
    """The names and the maker of each set of models."""
    own = families() | {name: each for name, each in further_families().items() if name not in REFUSED}
    small = cases() | long_cases() | routed_cases()
    deep = [name for name in bundled_models() if not name.endswith("-tiny")]

    def bundled(name: str) -> Specimen:
        example = load_model(name, 512 if name in CLUSTERS else 64, dtype="bfloat16").example_inputs
        model = load_model(name, 2, dtype="bfloat16").model
        assert isinstance(example, dict)
        return model, example

    return {
        "families": (list(own), lambda name: make_case(own[name], torch.float32, 16)),
        "small": (list(small), lambda name: make_case(small[name], torch.float32, 16)),
        "bundled": (deep, bundled),
        "written": (list(zoo.zoo()), zoo.specimen),
        "unseen": (list(unseen()), unseen_specimen),
        "packages": ([name for name in zoo_index.zoo_index() if zoo_index.installed(name)], zoo_index.make),
    }


def plan_of(kind: str, name: str, model: nn.Module, inputs: dict[str, Any], graph: Graph) -> Plan:
    """A plan of a kind. AutoparError where the model has none."""
    dtype = min({each.value.dtype for each in graph.parameters().values() if each.trainable} or {"float32"})
    large = kind == "offload" or (kind == "free choice" and name in bundled_models())
    cluster = Cluster.parse(CLUSTERS.get(name, "dgx-h100:1") if large else "local:4")
    if kind == "fp8":
        able = replace(cluster, device=replace(cluster.device, peak=(*cluster.device.peak, ("float8", 1e12))))
        return make_plan(model, able, inputs, force="dp=2,tp=2", precision="fp8")
    found = make_plan(model, cluster, inputs, force=FORCES.get(kind, "dp=2,tp=2"), precision=dtype, graph=graph)
    if kind == "drawn":
        return replace(found, candidate=drawn_candidate(graph, Mesh((Axis("dp", 2), Axis("tp", 2))), 1))
    if kind in CONTEXT:
        try:
            return replace(found, candidate=sequence_plan(graph, 2, CONTEXT[kind], cluster, 2))
        except (ValueError, IndexError):  # `sequence_plan` is of these tests: it has no such choice for some operation
            raise PlanError("not all attention of this model can be cut so") from None
    return found


def judge(kind: str, name: str, model: nn.Module, inputs: dict[str, Any], graph: Graph) -> tuple[str, str]:
    """`CERTIFIED`, `REFUSED_BY_CHECKER` or `NO_PROGRAM`, and why."""
    try:
        certificate = prove_program(plan_of(kind, name, model, inputs, graph))
    except (AutoparError, AssertionError) as error:
        return NO_PROGRAM, (str(error).splitlines() or [type(error).__name__])[0]
    return (CERTIFIED, "") if certificate.holds else (REFUSED_BY_CHECKER, certificate.line())


def records(
    only: Collection[str], models: Collection[str], plans: Collection[str], done: Collection[tuple[str, ...]]
) -> Iterator[dict[str, Any]]:
    """A record of each model and plan that is not done."""
    for group, (names, make) in sets().items():
        for name in names if group in only else ():
            few = [kind for kind in plans if group in ("families", "small") or kind in FEW]
            wanted = [kind for kind in few if (group, name, kind) not in done]
            if not wanted or (models and name not in models):
                continue
            try:
                model, inputs = make(name)
                graph = capture(model, (), inputs)
            except (AutoparError, ImportError) as error:
                yield {"set": group, "model": name, "plan": "", "found": "no graph", "why": str(error).splitlines()[0]}
                continue
            for kind in wanted:
                start = time.process_time()
                try:
                    found, why = judge(kind, name, model, inputs, graph)
                except Exception as error:  # noqa: BLE001  a defect, and not the end of the table
                    found, why = "traceback", f"{type(error).__name__}: {error}"[:300]
                seconds = round(time.process_time() - start, 2)
                yield {"set": group, "model": name, "plan": kind, "found": found, "why": why, "seconds": seconds}


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the document: programs that are certified, of all that there are, and models without that kind of plan."""
    counted = {each["set"] for each in found}
    written = {row[0]: row[1:] for row in _written()}  # of sets that this file has nothing of
    heads = [f"{group} ({_models(found, group)})" if group in counted else written["plans"][i] for i, group in enumerate(TITLES)]
    lines = [f"| plans | {' | '.join(heads)} |", "|---" * (len(TITLES) + 1) + "|"]
    for kind in PLANS:
        cells = []
        for index, group in enumerate(TITLES):
            if group not in counted:
                cells.append(written[kind][index])
                continue
            own = Counter(each["found"] for each in found if (each["set"], each["plan"]) == (group, kind))
            judged = own[CERTIFIED] + own[REFUSED_BY_CHECKER] + own["traceback"]
            cells.append(f"{own[CERTIFIED]} of {judged}" if judged else "-")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def _models(found: Sequence[Mapping[str, Any]], group: str) -> int:
    return len({each["model"] for each in found if each["set"] == group and each["plan"]})


def _written() -> list[list[str]]:
    """The rows of the document's table."""
    text = DOCUMENT.read_text()
    begin = text.index("| plans | ")
    lines = text[begin : text.index("\n\n", begin)].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write(lines: Sequence[str]) -> None:
    """Puts the table into the document."""
    text = DOCUMENT.read_text()
    begin = text.index("| plans | ")
    end = text.index("\n\n", begin)
    DOCUMENT.write_text(text[:begin] + "\n".join(lines) + text[end:])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("sets", nargs="*")
    parser.add_argument("--models", default="")
    parser.add_argument("--plans", default="", help="separated by semicolons")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    old = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    done = {(each["set"], each["model"], each["plan"]) for each in old}
    plans = given.plans.split(";") if given.plans else PLANS
    with given.file.open("a") as file, warnings.catch_warnings(action="ignore"):
        for each in records(given.sets or list(sets()), [x for x in given.models.split(",") if x], plans, done):
            print(json.dumps(each), file=file, flush=True)
            old.append(each)
    lines = table(old)
    print("\n".join(lines))
    if given.write:
        write(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
