"""Images that are cut along a dimension of space: programs equal one process, on real ranks, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, check_programs, prepare_model
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs, train_steps
from support.models.operations.images import IMAGES, case
from support.plans.space_pins import space_pins, space_rules

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Precision
from autopar.passes.lower import lower
from autopar.program.build import program_text
from autopar.program.export import export_program
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


@cache
def prepared(name: str) -> Prepared:
    return prepare_model(name, *case(name))


def cut(name: str, force: dict[str, int]) -> PlanResult:
    """The best plan that cuts whatever can be cut along space."""
    graph = prepared(name).graph
    pins = space_pins(graph, force["tp"])
    precision = Precision("float64", "float64")
    options = SearchOptions(batch=2, precision=precision, force={"pp": 1, **force}, pins=pins, registry=space_rules())
    world = force["tp"] * force.get("dp", 1) * force.get("pp", 1)
    return search(graph, Cluster.parse(f"local:{world}"), options)


FORCES = {"tp=4": {"tp": 4, "dp": 1}, "dp=2,tp=2": {"dp": 2, "tp": 2}}


SLOW = ("deep unet", "volume")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in IMAGES])
def test_equals_one_process(name: str, ranks: RankPool) -> None:
    model, texts = prepared(name), []
    for force in FORCES.values():
        texts.append(program_text(model.graph, cut(name, force).candidate))
        assert "convolution_halo(" in texts[-1]
    check_programs(ranks, model, texts, FORCES)


def test_exported_folder_equals_one_process(tmp_path: Path, ranks: RankPool) -> None:
    model = prepared("wave")
    lowered = lower(model.graph, cut("wave", FORCES["dp=2,tp=2"]).candidate)
    folder = export_program(lowered, "{}", tmp_path / "out", weights=model.state, batch=model.batch)
    ended = launch(ranks, folder / "train.py", 4, "--steps", "1", without="autopar")
    assert not any(each.status for each in ended), ended
    (loss,) = [float(line.split()[-1]) for line in ended[0].stdout.splitlines() if line.startswith("step ")]
    assert loss == pytest.approx(model.expected.loss, rel=1e-9)


@pytest.mark.parametrize("name", ["wave", pytest.param("volume", marks=pytest.mark.slow)])
def test_pipelines_equal_one_process(name: str, ranks: RankPool) -> None:
    """Two stages of two ranks that cut along space, two micro-batches of one example."""
    model = prepared(name)
    found = cut(name, {"dp": 1, "tp": 2, "pp": 2})
    assert found.candidate.pipeline.stages == 2 and found.candidate.micro_batches == 2
    text = program_text(found.graph, found.candidate)
    assert "convolution_halo(" in text
    for (outcome,) in ranks.run(train_programs, [(text, model.state, model.batch)], timeout=300):
        wrong = differences(outcome, model.expected, 1e-9)
        assert not wrong, wrong[:5]


@pytest.mark.slow
def test_compiled_blocks_equal_one_process(ranks: RankPool) -> None:
    model = prepared("wave")
    text = program_text(model.graph, cut("wave", FORCES["dp=2,tp=2"]).candidate)
    (found,) = ranks.run(train_steps, [(text, model.state, model.batch, "inductor")], timeout=240)[0]
    loss, gradients, _ = found
    wrong = differences((loss, gradients, {}, {}), model.expected, 1e-9, parameters=False)
    assert not wrong, wrong[:5]
