"""Measured collectives in the search: convex tables change the plan, and no bound rests on what they do not keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import drawn_above_bounds
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.measured_collectives import KINDS, STATE_KINDS, MeasuredCollective, PiecewiseLinear
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.stage_devices import cluster_for_bounds
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.solve.bounds.flow_bound import FlowRelaxation
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.ilp.state_sharding import _envelope
from autopar.solve.problem.forced_axes import forced_axes
from autopar.solve.problem.problem import build_problem
from autopar.solve.search import search
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables

FLOAT32 = Precision("float32", "float32")
LINEAR = PiecewiseLinear((0.0, 2.0**22), (1e-4, 1e-4 + 4e-3))
CONVEX = PiecewiseLinear((0.0, 2.0**16, 2.0**18, 2.0**22), (1e-4, 1.6e-4, 6e-3, 2e-1))
"""As LINEAR up to 64 KB; then a rate that is far lower, as if larger buffers were fresh pages."""


def small(batch: int = 8) -> Graph:
    return gpt2_graph(layers=2, hidden=128, heads=4, vocabulary=512, seq=64, batch=batch)


def measured(table: PiecewiseLinear, *kinds: str) -> Cluster:
    """Four ranks whose collectives of these kinds (by default all) take what the table says."""
    cluster = Cluster.parse("local:4")
    every = tuple(MeasuredCollective(kind, 4, table) for kind in kinds or (*KINDS, *STATE_KINDS))
    return replace(cluster, links=(replace(cluster.links[0], measured=every),))


def test_a_convex_table_changes_the_plan() -> None:
    """The same small messages, other large ones; each plan is the better one on its own cluster."""
    graph, linear, convex = small(), measured(LINEAR), measured(CONVEX)
    plans = [search(graph, cluster, SearchOptions(force={"pp": 1})) for cluster in (linear, convex)]
    first, second = (plan.candidate for plan in plans)
    assert first != second
    for cluster, own, other in ((linear, first, second), (convex, second, first)):
        graphs = {id(plan.candidate): plan.graph for plan in plans}
        mine, theirs = (evaluate(graphs[id(each)], each, cluster).step_seconds for each in (own, other))
        assert mine < theirs


@pytest.mark.parametrize("kinds", [(), ("all_gather", "reduce_scatter", "all_reduce"), ("parameter_gather", "gradient_scatter")])
def test_no_drawn_plan_is_below_the_bound(kinds: tuple[str, ...]) -> None:
    """Plans drawn from the rules by a seed, with every state sharding, micro-batches, and recomputation."""
    graph, cluster = small(), measured(CONVEX, *kinds)
    result = search(graph, cluster, SearchOptions(force={"pp": 1} if kinds else {}))
    assert result.evaluation.step_seconds >= result.lower_bound_seconds * (1 - 1e-9)
    assert drawn_above_bounds(graph, cluster, result, seeds=4) >= 8


def test_bounds_hold_for_more_micro_batches() -> None:
    """Eight small messages take less than one large one, so that the relaxation of one micro-batch bounds no other by these
    prices; by those for bounds it does."""
    cluster, mesh = measured(CONVEX), mesh_of(dp=1, tp=4)

    def relaxed(prices: Cluster) -> float:
        problem = build_problem(small(8), mesh, prices, FLOAT32, "adamw", default_registry())
        return FlowRelaxation(problem).bound(30.0)

    parts = build_problem(small(1), mesh, cluster, FLOAT32, "adamw", default_registry(), micro_batches=8)
    form = formulate(parts)
    plan = decode(form, ilp.solve(form.model, relative_gap=1e-6).values)
    step = evaluate(small(8), replace(plan, batch=8), cluster).step_seconds
    assert relaxed(cluster) > 1.01 * step
    assert relaxed(cluster_for_bounds(cluster)) <= step * (1 + 1e-9)


def test_more_micro_batches_are_found_where_they_are_faster() -> None:
    """On one mesh: the search takes the point that is best of all when each is solved to its end, and bounds none above that."""
    graph, cluster, options = small(), measured(CONVEX), SearchOptions(force={"dp": 1, "tp": 4, "pp": 1})
    result = search(graph, cluster, options)
    tables, steps = ProblemTables(graph, cluster, options, default_registry()), []
    for each in result.solutions:
        point = each.point
        problem = tables.problem(GridPoint(point.mesh, point.micro_batches))
        axes = forced_axes(point.mesh, options.force)
        attempt = MeshSolver(graph, problem, axes, 1e-6, MeshSolution(point))
        attempt.solve_with_memory(20.0)
        assert attempt.result.plan is not None
        steps.append((attempt.result.plan.evaluation.step_seconds, point.micro_batches))
        assert each.bound_seconds <= steps[-1][0] * (1 + 1e-6)
    assert min(steps)[1] > 1 and result.evaluation.step_seconds <= min(steps)[0] * 1.001
    assert result.lower_bound_seconds <= min(steps)[0] * (1 + 1e-6)


@pytest.mark.parametrize(("batch", "dp", "tp"), [(16, 4, 1), (16, 2, 2)])
def test_a_batch_at_once_by_the_prices_for_bounds(batch: int, dp: int, tp: int) -> None:
    """Not slower than in micro-batches, and no plan slower than by the true prices."""
    cluster = measured(CONVEX)
    least = cluster_for_bounds(cluster)
    for seed in range(4):
        plan = drawn_candidate(small(batch), mesh_of(dp=dp, tp=tp), seed, zero=seed)
        steps = [evaluate(small(batch), replace(plan, micro_batches=count), least).step_seconds for count in (1, 2, 4)]
        assert steps[0] <= steps[1] * (1 + 1e-9) and steps[1] <= steps[2] * (1 + 1e-9)
        assert steps[0] <= evaluate(small(batch), plan, cluster).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("zeros", [(3,), (0, 1, 2, 3)])
def test_the_program_is_not_above_the_evaluator(zeros: tuple[int, ...]) -> None:
    """Equal where the elements on one device are given, and below where placements choose them."""
    for mesh, exact in ((mesh_of(dp=4, tp=1), True), (mesh_of(dp=2, tp=2), False)):
        problem = build_problem(small(), mesh, measured(CONVEX), FLOAT32, "adamw", default_registry(), zeros)
        form = formulate(problem)
        outcome = ilp.solve(form.model, relative_gap=1e-7)
        found = evaluate(small(), decode(form, outcome.values), measured(CONVEX)).step_seconds
        ratio = found / (outcome.objective * form.second_unit)
        assert ratio >= 1 - 1e-6 and (not exact or ratio == pytest.approx(1.0, abs=1e-6))


@pytest.mark.parametrize("table", [LINEAR, CONVEX, PiecewiseLinear((0.0, 1e5, 1e6, 2e6), (1.0, 5.0, 6.0, 20.0))])
@pytest.mark.parametrize(("low", "high"), [(1e4, 3e6), (9e4, 1.5e6), (1e5, 1e5), (2e6, 9e6)])
def test_the_envelope_of_a_price(table: PiecewiseLinear, low: float, high: float) -> None:
    """Below it everywhere, and as high as a convex function can be: it meets the price at both ends."""
    lines = _envelope(table.at, low, high, table.sizes)
    for step in range(101):
        size = low + (high - low) * step / 100
        assert max(slope * size + start for slope, start in lines) <= table.at(size) * (1 + 1e-9)
    for size in (low, high):
        assert max(slope * size + start for slope, start in lines) == pytest.approx(table.at(size))


def test_no_pipeline_is_below_its_bounds() -> None:
    """Two stages of two ranks, each number of micro-batches forced in turn: what the search of all of them knows of a point is
    below what is found there."""
    graph, cluster, force = small(64), measured(CONVEX), {"pp": 2, "tp": 2}
    every = search(graph, cluster, SearchOptions(force=force))
    points = (each for each in every.solutions if each.point.stages == 2 and each.plan is None)
    bounds = {each.point.micro_batches: each.bound_seconds for each in points}
    assert len(bounds) > 1
    for micro_batches, bound in bounds.items():
        found = search(graph, cluster, SearchOptions(force={**force, "micro": graph.batch // micro_batches}))
        assert found.candidate.micro_batches == micro_batches
        assert bound <= found.evaluation.step_seconds * (1 + 1e-9)
        assert every.lower_bound_seconds <= found.evaluation.step_seconds * (1 + 1e-9)


def test_the_tables_of_bounds_are_their_own() -> None:
    cluster = measured(CONVEX)
    tables = ProblemTables(small(), cluster, SearchOptions(), default_registry())
    point = GridPoint(mesh_of(dp=1, tp=4), 1)
    exact, bound = tables.problem(point), tables.problem(point, cluster=cluster_for_bounds(cluster))
    assert tables.problem(point) is exact and bound.cluster != exact.cluster
