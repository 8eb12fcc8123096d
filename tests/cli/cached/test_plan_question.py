"""The question that the plan cache is asked: made of every field of the options, of the cluster and graph, and of all sources."""

from __future__ import annotations

import ast
import shutil
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.handwritten_blocks import gpt2_graph
from torch import nn

import autopar
from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.placement import Replicate
from autopar.ir.plan import Precision
from autopar.options import PlanOptions
from autopar.rules.registry import default_registry
from autopar.solve.plan_cache import Question, plain_data, question_of, source_digest
from autopar.solve.space.options import SearchOptions

OPTIONS = PlanOptions()
SEARCH = SearchOptions()
OTHER: dict[str, Any] = {
    "precision": "bf16", "force": "tp=2", "constrain": {"x": {"tp": "R"}}, "optimizer": "sgd", "strict": True,
    "time_limit_seconds": 7.0, "outputs": ("logits",), "batch_norm": "local", "expert_load": 1.5, "document_lengths": 512,
    "loss_fn": nn.functional.mse_loss, "memory_margin": 0.2, "held_bytes": 2**20, "batch_dim": {"x": 1}, "batch": 16, "seq": 8,
    "name": "net", "source": "net.py", "compile": True, "processes": 2,
    "mode": "inference", "new_tokens": 3, "objective": "throughput",
}  # fmt: skip
OTHER_SEARCH: dict[str, Any] = {
    "batch": 16, "precision": Precision("bfloat16"), "optimizer": "sgd", "force": {"tp": 2}, "schedule": "gpipe", "strict": True,
    "time_limit_seconds": 7.0, "pins": {"x": {"tp": "I"}}, "stored": {"w": (Replicate(),)}, "placed": {"x": {"dp": Replicate()}},
    "registry": default_registry(), "relative_gap": 0.1, "sharp_gap": 0.1, "min_improvement": 0.1, "min_improvement_large": 0.1,
    "indifference": 0.1, "processes": 2, "may_offload_optimizer": False,
}  # fmt: skip


def question(options: Any = OPTIONS, search: SearchOptions = SEARCH, cluster: str = "local:2", batch: int = 4) -> Question:
    return question_of(gpt2_graph(layers=1, batch=batch), Cluster.parse(cluster), options, search)


def test_equal_questions_are_equal() -> None:
    assert question() == question()


@pytest.mark.parametrize("name", [each.name for each in fields(PlanOptions)])
def test_each_option_is_part_of_the_question(name: str) -> None:
    base = replace(OPTIONS, mode="inference") if name in ("new_tokens", "objective") else OPTIONS
    assert question(replace(base, **{name: OTHER[name]})) != question(base)


@pytest.mark.parametrize("name", [each.name for each in fields(SearchOptions)])
def test_each_option_of_the_search_is_part_of_the_question(name: str) -> None:
    assert question(search=replace(SEARCH, **{name: OTHER_SEARCH[name]})) != question()


def test_cluster_and_graph_are_part_of_the_question() -> None:
    assert question(cluster="local:4") != question() and question(batch=8) != question()


@pytest.mark.parametrize("base", [PlanOptions, SearchOptions])
def test_a_new_option_is_part_of_the_question(base: type) -> None:
    """Nobody has to remember it: a field that this test invents is asked too."""
    wider = make_dataclass("Wider", [("invented", int, field(default=0))], bases=(base,), frozen=True)
    asked = [{"options" if base is PlanOptions else "search": wider(invented=value)} for value in (0, 1)]
    assert question(**asked[0]) != question(**asked[1])


@dataclass(frozen=True)
class Strange:
    thing: object


def test_what_cannot_be_compared_is_no_option() -> None:
    with pytest.raises(TypeError, match="not comparable"):
        plain_data(Strange(object()))


def test_a_users_rule_is_part_of_the_question() -> None:
    rules = default_registry()
    more = rules.register("mylib::op", "b s -> b s")
    assert question(search=replace(SEARCH, registry=rules)) != question(search=replace(SEARCH, registry=more))


# -- sources

ROOT = Path(autopar.__file__).parent


def planning_files() -> set[Path]:
    """The files of this package that `autopar.planning` imports, and those import, also inside of functions."""
    found: set[Path] = set()
    waiting = ["autopar.planning"]
    while waiting:
        stem = ROOT.joinpath(*waiting.pop().split(".")[1:])
        path = next((each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.is_file()), None)
        if path is None or path in found:
            continue
        found.add(path)
        package = ["autopar", *path.relative_to(ROOT).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                name = ".".join([*base, *filter(None, [node.module])])
                waiting += [name, *(f"{name}.{alias.name}" for alias in node.names)]
    return found


def test_an_edit_in_any_package_that_planning_imports_is_another_question(tmp_path: Path) -> None:
    """Of every package one file, and of every kind of file that is no code."""
    files = [path.relative_to(ROOT) for path in sorted(planning_files())]
    by_package = {path.parent: path for path in files}
    assert {Path("schedules/builders"), Path("software"), Path("passes"), Path("cost_models/hardware")} <= set(by_package)
    data = {path.suffix: path.relative_to(ROOT) for path in ROOT.rglob("*") if path.suffix not in ("", ".py", ".pyc")}
    for path in (*by_package.values(), *data.values()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    before = source_digest(tmp_path)
    for path in (*by_package.values(), *data.values()):
        own = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(own + b"\n")
        assert source_digest(tmp_path) != before, path
        (tmp_path / path).write_bytes(own)
    assert source_digest(tmp_path) == before


# -- whole commands


def schedule_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: str) -> str:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    words = [
        "plan",
        "gpt2-tiny",
        "--cluster",
        "dgx-h100:1",
        "--batch",
        "16",
        "--processes",
        "1",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    assert main([*words, "--force", force]) == 0
    return autopar.Plan.from_json((tmp_path / "plan.json").read_text()).candidate.pipeline.schedule


def test_forced_schedules_are_questions_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("gpipe", "1f1b", "gpipe"):
        assert schedule_of(tmp_path, monkeypatch, f"pp=2,micro=2,schedule={name}") == name
    assert capsys.readouterr().err.count("done before") == 1


def test_a_plan_with_another_question_beside_it_is_not_taken(tmp_path: Path) -> None:
    """A file is found by its name, and believed by the question in it."""
    model, batch = nn.Linear(8, 8), (torch.zeros(4, 8),)
    ask: dict[str, Any] = dict(cluster=Cluster.parse("local:2"), example_inputs=batch, cache=tmp_path)
    lines: list[str] = []
    autopar.plan(model, force="tp=2", **ask)
    (first,) = tmp_path.iterdir()
    autopar.plan(model, force="dp=2", **ask)
    second = next(path for path in tmp_path.iterdir() if path != first)
    second.write_text(first.read_text())
    assert autopar.plan(model, force="dp=2", progress=lines.append, **ask).candidate.mesh.size_of("dp") == 2
    assert not any("done before" in line for line in lines)
