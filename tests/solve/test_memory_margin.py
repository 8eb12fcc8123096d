"""Plans leave the memory margin free, and a larger margin is never faster; and other models their memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from support.models.handwritten_blocks import gpt2_graph
from torch import Tensor, nn

import autopar
from autopar.cost_models.hardware.allocator import MEMORY_MARGIN, communicator_count, tensor_budget_bytes
from autopar.cost_models.hardware.cluster import Cluster, with_memory_margin
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError, Infeasible, PlanMismatch
from autopar.given_plan import check_options
from autopar.ir.plan_file.plan_file import Plan, decode_plan
from autopar.options import held_bytes
from autopar.rules.registry import default_registry
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import pipeline_points

MARGINS = (0.0, 0.1, 0.3)


@lru_cache
def roomy() -> PlanResult:
    return search(gpt2_graph(layers=4, batch=8), Cluster.parse("dgx-h100:1"), SearchOptions(force={"pp": 1}))


@lru_cache
def planned(margin: float, pp: int = 1) -> tuple[PlanResult, Cluster]:
    """On devices that the fastest plan would fill."""
    whole = Cluster.parse("dgx-h100:1")
    device = replace(whole.device, memory_bytes=roomy().evaluation.peak_memory_bytes)
    cluster = with_memory_margin(replace(whole, device=device), margin)
    return search(gpt2_graph(layers=4, batch=8), cluster, SearchOptions(force={"pp": pp})), cluster


@pytest.mark.parametrize(
    ("margin", "pp"),
    [*((margin, 1) for margin in MARGINS), *(pytest.param(margin, 2, marks=pytest.mark.slow) for margin in (0.0, 0.1, 0.2))],
)
def test_a_plan_leaves_the_margin_free(margin: float, pp: int) -> None:
    found, cluster = planned(margin, pp)
    capacity = cluster.device.memory_bytes
    assert found.evaluation.fits
    for stage in found.evaluation.stage_memory:
        assert stage.peak_bytes <= stage.budget_bytes == int((1 - margin) * capacity) and stage.capacity_bytes == capacity
        assert stage.tensor_bytes <= stage.reserved_bytes <= stage.peak_bytes and stage.least_bytes <= stage.peak_bytes
    for each in found.solutions:
        if each.solved and each.plan is not None:
            assert each.plan.evaluation.peak_memory_bytes <= (1 - margin) * capacity


def test_infeasible_margin_below_context_and_communicators() -> None:
    """Every pipeline of two stages on these devices has three communicators at least (its stage's mesh, the pipeline's, that of
    all ranks), which alone take more than a margin of 30 % leaves: no tensor of any plan has a place."""
    graph, whole = gpt2_graph(layers=4, batch=8), Cluster.parse("dgx-h100:1")
    device = replace(whole.device, memory_bytes=roomy().evaluation.peak_memory_bytes)
    cluster = with_memory_margin(replace(whole, device=device), 0.3)
    points = list(pipeline_points(graph, cluster, {"pp": 2}, default_registry()))
    assert points
    for point in points:
        assert tensor_budget_bytes(cluster.device, communicator_count(point.mesh, point.zero_group, point.stages)) < 0
    with pytest.raises(Infeasible) as caught:
        planned(0.3, 2)
    said = str(caught.value)
    assert "where the framework's base takes 2.7 GiB" in said and said.count("the same without forcing pp=2") == 1


def test_a_larger_margin_is_never_faster() -> None:
    seconds = [planned(margin)[0].evaluation.step_seconds for margin in MARGINS]
    for less, more in zip(seconds, seconds[1:], strict=False):
        assert more >= less * (1 - SearchOptions().min_improvement)
    assert seconds[-1] > seconds[0]


def test_a_plan_may_run_that_does_not_fit() -> None:
    """Within the capacity, and over the budget: it is no plan, but it is not sure to run out of memory."""
    found, cluster = planned(0.0)
    tight = evaluate(found.graph, found.candidate, with_memory_margin(cluster, 0.3))
    assert not tight.fits and tight.can_run
    device = replace(cluster.device, memory_bytes=found.evaluation.fullest_stage.least_bytes - 1)
    assert not evaluate(found.graph, found.candidate, replace(cluster, device=device)).can_run


def test_what_the_margin_forbids_names_a_smaller_one() -> None:
    graph, whole = gpt2_graph(layers=2, hidden=128, heads=4, vocabulary=512, seq=64, batch=8), Cluster.parse("local:2")
    options = SearchOptions(force={"pp": 1})
    least = search(graph, whole, options).evaluation.peak_memory_bytes
    cluster = with_memory_margin(replace(whole, device=replace(whole.device, memory_bytes=least)), 0.4)
    with pytest.raises(Infeasible, match=r"a margin of 40 % stays free(.|\n)*--memory-margin 0"):
        search(graph, cluster, options)


# -- parallelize and plan files


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


def plan(**options: Any) -> autopar.Plan:
    return autopar.plan(Net(), "local:2", (torch.zeros(8, 32),), **options)


def test_the_plan_says_its_margin() -> None:
    made, asked = plan(), plan(memory_margin=0.5)
    assert made.document.predicted.memory_margin == MEMORY_MARGIN and asked.document.predicted.memory_margin == 0.5
    device = asked.document.cluster.description["device"]
    assert device["memory_margin"] == 0.5 and device["memory_bytes"] == asked.document.predicted.memory_capacity_bytes
    assert decode_plan(asked.to_json()).document == asked.document


def test_a_plan_of_an_older_autopar_loads() -> None:
    data = json.loads(plan().to_json())
    for name in ("memory_margin", "memory_capacity_bytes"):
        del data["predicted"][name]
    for name in ("memory_margin", "communicator_bytes"):
        del data["cluster"]["description"]["device"][name]
    old = decode_plan(json.dumps(data))
    assert old.document.predicted.memory_margin is None
    assert Cluster.from_dict(old.document.cluster.description).device.memory_margin == 0


# -- several models on one cluster


WIDTH = 512
STATE_BYTES = 4 * 4 * (2 * WIDTH * WIDTH)
"""Parameters, gradients and moments of the two layers."""


def two_layers(memory_bytes: float, beside: object = ()) -> Plan:
    """The plan of two layers on four devices of so much memory beside what the process takes."""
    cluster = Cluster.parse("local:4")
    device = replace(cluster.device, memory_bytes=int(memory_bytes) + cluster.device.base_bytes)
    groups = tuple(replace(group, device=device) for group in cluster.groups)
    cluster = replace(cluster, device=device, groups=groups)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return autopar.plan(model, cluster, (torch.randn(4, WIDTH),), force="dp=4", memory_margin=0.0, beside=beside)


def peak(plan: Plan) -> int:
    found = plan.document.predicted.peak_memory_bytes
    assert found is not None
    return found


def test_the_second_plan_fits_beside_the_first() -> None:
    alone = two_layers(2.5 * STATE_BYTES)
    held = peak(alone) - alone.document.predicted.memory["base"]
    room = held + 0.8 * STATE_BYTES
    second = two_layers(room, beside=alone)
    assert second.document.cluster.description["device"]["held_bytes"] == held
    capacity = second.document.predicted.memory_capacity_bytes
    assert capacity is not None and peak(second) <= capacity
    assert peak(second) - held < peak(two_layers(room)), "it has to shard what it would replicate alone"


def test_what_others_take_is_said_where_nothing_fits() -> None:
    alone = two_layers(2.5 * STATE_BYTES)
    with pytest.raises(Infeasible, match="are left to other models"):
        two_layers(peak(alone) - alone.document.predicted.memory["base"] + 2**16, beside=[alone])


def test_a_given_plan_that_leaves_too_little_is_refused() -> None:
    """`beside` says nothing to a plan that was made before: it has to leave that much."""
    alone = two_layers(STATE_BYTES * 4)
    room = held_bytes(alone)
    model = nn.Linear(2, 2)
    check_options(two_layers(2 * STATE_BYTES * 4, beside=alone), model, None, "", held_bytes=room)
    with pytest.raises(PlanMismatch, match="leaves 0 GiB to other models.*plan again with beside="):
        check_options(alone, model, None, "", held_bytes=room)


def test_only_plans_are_beside() -> None:
    with pytest.raises(AutoparError, match="has no plan"):
        two_layers(STATE_BYTES, beside=[nn.Linear(2, 2)])
