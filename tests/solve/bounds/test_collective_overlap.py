"""Collectives of compiled blocks that run beside products: the program against the evaluator, the evaluator by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.solver_graphs import llama_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import async_tp_axes
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.call_trace import CallTrace, costs_as_run
from autopar.cost_models.step.evaluate import async_tp_of, evaluate
from autopar.cost_models.step.product_overlap import LEAST_ELEMENTS
from autopar.ir.plan import Candidate, Precision
from autopar.passes.bucket_conversions import BucketConversions
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.problem.problem import Problem, build_problem

BF16 = Precision("bfloat16", "float32")
LAYER = "LlamaDecoderLayer"


def compiled(contention: float = 0.0) -> Cluster:
    cluster = with_compilation(Cluster.parse("dgx-h100:1"), True)
    return replace(cluster, overlap=replace(cluster.overlap, contention=contention))


def problem_of(cluster: Cluster, batch: int, **axes: int) -> Problem:
    return build_problem(llama_graph(batch=batch), mesh_of(**axes), cluster, BF16, "adamw", default_registry())


def solved(problem: Problem) -> tuple[float, Candidate]:
    form = formulate(problem)
    outcome = ilp.solve(form.model, relative_gap=1e-9)
    return outcome.objective * form.second_unit, decode(form, outcome.values)


@pytest.mark.parametrize("contention", [0.0, 0.3])
@pytest.mark.parametrize("batch", [32, 2])
@pytest.mark.parametrize("axes", [dict(dp=1, tp=8), dict(dp=2, tp=4), dict(dp=1, tp=4, tp2=2)])
def test_the_program_has_the_evaluators_price(axes: dict[str, int], batch: int, contention: float) -> None:
    """Large batches gather weights, small ones activations."""
    problem = problem_of(compiled(contention), batch, **axes)
    seconds, candidate = solved(problem)
    step = evaluate(problem.graph, candidate, problem.cluster)
    assert seconds == pytest.approx(step.step_seconds, rel=1e-12)
    for seed in range(20):
        drawn = drawn_candidate(problem.graph, problem.mesh, seed, zero=0, wild=0.5, precision=BF16)
        assert seconds <= evaluate(problem.graph, drawn, problem.cluster).step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_exposed_seconds_by_hand(contention: float) -> None:
    """A column-parallel product computes the gradient of its input, then sends that while it computes the gradient of its
    weight."""
    problem = problem_of(compiled(contention), 32, dp=1, tp=8)
    plan = solved(problem)[1].block(LAYER)
    costs = problem.blocks[LAYER].costs
    exposed = hidden = 0.0
    for each in plan.conversions:
        cost = costs.conversion(each.value, each.source, each.target)
        readers = [node for node in plan.nodes if costs.nodes[node.node].operands()[:1] == (each.value,)]
        products = [node for node in readers if costs.nodes[node.node].op == "aten.linear" and node.operands[0] == each.target]
        beside = sum(costs.node(node).backward_seconds / 2 for node in products)
        less = min(cost.backward_comm_seconds * (1 - contention), beside)
        exposed += cost.forward_comm_seconds + cost.backward_comm_seconds - less
        hidden += less
    assert hidden > 0.05 * exposed
    assert sum(CallTrace.of(costs, plan).exposed_axis_seconds) == pytest.approx(exposed)
    delayed, eager = costs_as_run(costs, plan, split_backward=True), costs.eager
    assert sum(CallTrace.of(delayed, plan).exposed_axis_seconds) == pytest.approx(exposed + hidden)
    assert sum(CallTrace.of(eager, plan).exposed_axis_seconds) == pytest.approx(exposed + hidden)


@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_seconds_in_pieces_by_hand(contention: float) -> None:
    """Products of eight pieces: an all-gather beside those that read it, a reduce-scatter beside the one that it completes, and
    the all-gather of that one's gradient beside the gradient of its input."""
    problem = problem_of(compiled(contention), 2, dp=1, tp=8)
    plan = solved(problem)[1].block(LAYER)
    costs = problem.blocks[LAYER].costs
    share, launches = 7 / 8 * (1 - contention), 7 * problem.cluster.device.launch_seconds
    products = {node.node: node for node in plan.nodes if costs.nodes[node.node].op == "aten.linear"}
    hidden = whole = 0.0
    kinds = []
    for each in plan.conversions:
        cost = costs.conversion(each.value, each.source, each.target)
        whole += cost.forward_comm_seconds + cost.backward_comm_seconds
        readers = [node for name, node in products.items() if costs.nodes[name].operands()[0] == each.value]
        readers = [node for node in readers if node.operands[0] == each.target]
        weights = sum(costs.node(node).backward_seconds / 2 for node in readers)
        hidden += min(cost.backward_comm_seconds * (1 - contention), weights)
        if readers and cost.forward_kind == "all_gather":
            beside = sum(costs.node(node).forward_seconds for node in readers)
            hidden += min(share * cost.forward_comm_seconds - launches, share * beside)
        if each.value in products and cost.forward_kind == "reduce_scatter":
            made = costs.node(products[each.value])
            hidden += min(share * cost.forward_comm_seconds - launches, share * made.forward_seconds)
            hidden += min(share * cost.backward_comm_seconds - launches, share * made.backward_seconds / 2)
        kinds += [cost.forward_kind] * bool(readers or each.value in products)
    assert {"all_gather", "reduce_scatter"} <= set(kinds)
    assert sum(CallTrace.of(costs, plan).exposed_axis_seconds) == pytest.approx(whole - hidden, rel=1e-12)
    delayed, eager = costs_as_run(costs, plan, split_backward=True), costs.eager
    assert sum(CallTrace.of(delayed, plan).exposed_axis_seconds) == pytest.approx(whole, rel=1e-12)
    assert sum(CallTrace.of(eager, plan).exposed_axis_seconds) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("cluster", "axes", "expected"),
    [
        ("dgx-h100:2", dict(dp=2, tp=8), {"tp"}),
        ("dgx-h100:2", dict(dp=1, tp=16), set()),
        ("dgx-h100:2", dict(dp=1, tp=8, tp2=2), {"tp2"}),
        ("dgx-h100:2", dict(dp=1, tp=2, tp2=8), {"tp2"}),
        ("dgx-b200:1", dict(dp=2, tp=4), {"tp"}),
        ("dgx-a100:1", dict(dp=1, tp=8), set()),
        ("gb200-nvl72:2", dict(dp=1, tp=8), set()),
        ("mi300x:1", dict(dp=1, tp=8), set()),
        ("local:8", dict(dp=1, tp=8), set()),
    ],
)
def test_axes_in_pieces_are_within_a_node_that_has_symmetric_memory(
    cluster: str, axes: dict[str, int], expected: set[str]
) -> None:
    devices, mesh = Cluster.parse(cluster), mesh_of(**axes)
    found = async_tp_axes(with_compilation(devices, True), mesh)
    assert {mesh.axes[axis].name for axis in found} == expected
    assert not async_tp_axes(with_compilation(devices, False), mesh)


@pytest.mark.parametrize(
    ("cluster", "axes", "expected"),
    [
        ("dgx-h100:2", dict(dp=2, tp=8), {"tp"}),
        ("dgx-h100:2", dict(dp=1, tp=16), set()),
        ("dgx-h100:2", dict(dp=1, tp=2, tp2=8), {"tp", "tp2"}),
        ("dgx-a100:1", dict(dp=1, tp=8), {"tp"}),
        ("gb200-nvl72:2", dict(dp=1, tp=8), {"tp"}),
        ("mi300x:1", dict(dp=1, tp=8), set()),
    ],
)
def test_axes_by_messages_are_over_one_switch(cluster: str, axes: dict[str, int], expected: set[str]) -> None:
    """In a mesh of links a device has a part of its bandwidth towards each of the others."""
    devices, mesh = Cluster.parse(cluster), mesh_of(**axes)
    devices = replace(devices, overlap=replace(devices.overlap, async_tp_by_messages=True))
    found = async_tp_axes(with_compilation(devices, True), mesh)
    assert {mesh.axes[axis].name for axis in found} == expected
    assert not async_tp_axes(with_compilation(devices, False), mesh)


@pytest.mark.parametrize(("batch", "expected"), [(32, {}), (2, {"tp": LEAST_ELEMENTS})])
def test_axes_of_a_plan_are_those_with_collectives_in_pieces(batch: int, expected: dict[str, int]) -> None:
    """A plan that gathers weights needs no symmetric memory."""
    problem = problem_of(compiled(), batch, dp=1, tp=8)
    candidate = solved(problem)[1]
    assert async_tp_of(problem.graph, candidate, problem.cluster) == expected
    assert not async_tp_of(problem.graph, candidate, with_compilation(problem.cluster, False))


def test_collectives_in_pieces_are_of_larger_tensors_than_those_that_share_one() -> None:
    assert BucketConversions().small_bytes < LEAST_ELEMENTS * 4
