"""Plans that were found before, one file each: the question in full, and the plan that answers it.

The question is made by iterating over the fields of all that planning reads (options of the user and of the search, cluster,
graph) and of the software that answers: nothing is listed by hand, so nothing new can be forgotten."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import msgspec

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, FileError
from autopar.files import read_bytes, write_whole
from autopar.ir.graph import Graph
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.codec import encode
from autopar.ir.plan_file.plan_file import Plan
from autopar.schedules.pipeline_schedule import INTERLEAVED
from autopar.solve.problem.pins import why_disobeyed_pins
from autopar.solve.space.options import SearchOptions

Question = Mapping[str, Any]

_LONGEST = 2000
"""Characters of a part of a question that is kept as it is; of a longer one (a graph, the table of rules) its digest is."""


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans. A file that is damaged, or answers another question after all, counts as absent and is written again."""

    folder: Path

    def load(self, question: Question, graph: Graph, cluster: Cluster, options: SearchOptions) -> Plan | None:
        """Return the decisions that answer the question, on the captured `graph`; None where there are none."""
        try:
            entry = json.loads(read_bytes(self._path(question), FileError, "the plan"))
            if not isinstance(entry, dict) or entry.get("question") != question:
                return None
            plan = planfile.decode_plan(json.dumps(entry.get("plan")))
            if not _answers(plan, graph, cluster, options):
                return None
            plan = plan.with_graph(graph)  # with its lines of source, which may be pinned
            return None if why_disobeyed_pins(plan.graph, plan.candidate, options.pins) else plan
        except (AutoparError, ValueError, RecursionError):
            return None

    def store(self, question: Question, plan: Plan) -> None:
        """Store a plan that was solved to the end: the same search may find more on a machine that is less busy. A folder that
        cannot be written is no error."""
        search = plan.document.search
        if search.cut_short:
            return
        with suppress(OSError, FileError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(question), json.dumps({"question": question, "plan": json.loads(plan.to_json())}))

    def _path(self, question: Question) -> Path:
        return self.folder / f"{_digest(question)[:32]}.json"


def _answers(plan: Plan, graph: Graph, cluster: Cluster, options: SearchOptions) -> bool:
    """Return whether a plan is one that the question allows: what stands beside it in the file is no proof."""
    document, candidate = plan.document, plan.candidate
    pipeline = candidate.pipeline
    degrees = {axis.name: axis.size for axis in candidate.mesh.axes} | {"pp": pipeline.stages}
    precision = candidate.precision
    if options.may_offload_optimizer and not options.precision.offload_optimizer:
        precision = replace(precision, offload_optimizer="")  # the search may have taken it
    return (
        plan.graph.fingerprint == graph.fingerprint
        and document.cluster.description == json.loads(json.dumps(cluster.to_dict()))
        and (candidate.batch, precision, document.optimizer) == (options.batch, options.precision, options.optimizer)
        and all(degrees.get(name, 1) == size for name, size in options.force.items() if name in ("dp", "tp", "tp2", "ep", "pp"))
        and (pipeline.stages == 1 or options.schedule in ("", INTERLEAVED, pipeline.schedule))
    )


def question_of(graph: Graph, cluster: Cluster, options: Any, search: SearchOptions) -> Question:
    """Return all that an answer depends on: the user's `options` and those of the search (any frozen dataclasses), the cluster,
    the graph (but for its lines of source), and the software."""
    parts = {
        "graph": msgspec.to_builtins(encode(_without_sources(graph))), "cluster": plain_data(cluster),
        **{f"options.{name}": value for name, value in plain_data(options).items()},
        **{f"search.{name}": value for name, value in plain_data(search).items()},
        "software": software(),
    }  # fmt: skip
    return {name: _shorten(json.loads(json.dumps(part))) for name, part in parts.items()}


def _without_sources(graph: Graph) -> Graph:
    """Drop the lines of source: a comment above the model moves them, and is no other question."""
    blocks = (replace(block, nodes=tuple(replace(node, source="") for node in block.nodes)) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))


def _shorten(part: Any) -> Any:
    return part if len(json.dumps(part)) <= _LONGEST else f"sha256:{_digest(part)}"


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()


def plain_data(value: Any) -> Any:
    """A value as data of JSON, field by field. TypeError for a kind of which this function cannot tell two values apart: a
    question never leaves anything out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_data(getattr(value, each.name)) for each in fields(value) if each.init}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list | tuple):
        return [plain_data(each) for each in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if callable(value):  # a loss function, whose operations are in the graph; a function of the table of rules, whose file counts
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    raise TypeError(f"{type(value).__name__} is not comparable with that of another question")


@cache
def software() -> dict[str, str]:
    """Versions of Python and of all that autopar requires, and the digest of its own sources, so that an edited checkout meets no
    plan from before."""
    try:
        names = [re.split(r"[^\w.-]", each)[0] for each in requires("autopar") or () if "extra ==" not in each]
    except PackageNotFoundError:
        names = []
    own = {"python": platform.python_version(), "sources": source_digest(Path(__file__).resolve().parents[1])}
    return own | {name: _version(name) for name in ("autopar", *names)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def source_digest(package: Path) -> str:
    """The digest of all files of a package: of planning's own, and of those that it imports or reads, wherever they lie."""
    digest = hashlib.sha256()
    for path in sorted(_sources(package)):
        digest.update(f"{path.relative_to(package)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _sources(package: Path) -> Iterator[Path]:
    """Yield the source files of a package; in a checkout two of the subpackages are links."""
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names)
