"""The certificate: no plan of the printed grid is below its lower bound; and what an interrupted search returns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import drawn_graph
from support.oracles.brute_force import Exhaustion
from support.plans.drawn_recomputation import drawn_above_bounds

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.grid import devices_per_node, grid_points
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables


def small(batch: int = 8) -> Graph:
    return gpt2_graph(layers=2, hidden=128, heads=4, vocabulary=512, seq=64, batch=batch)


def cluster_of(text: str, memory_bytes: int = 0) -> Cluster:
    """Four devices; with `memory_bytes` that much beside the base, and no host to offload to."""
    cluster = replace(Cluster.parse(text), size=4)
    if not memory_bytes:
        return cluster
    device = replace(cluster.device, memory_bytes=cluster.device.base_bytes + memory_bytes, communicator_bytes=0)
    return replace(cluster, device=device, host=None)


ROOMY, TIGHT = 0, 7 * 2**20


@pytest.mark.parametrize(("text", "memory_bytes"), [("local:4", ROOMY), ("dgx-h100:1", TIGHT)])
def test_no_drawn_plan_is_below_the_bound(text: str, memory_bytes: int) -> None:
    """Plans drawn from the rules by a seed, with every state sharding, micro-batches, and recomputation."""
    graph, cluster = small(), cluster_of(text, memory_bytes)
    result = search(graph, cluster, SearchOptions())
    assert drawn_above_bounds(graph, cluster, result, seeds=6) >= 8


@pytest.mark.parametrize(("text", "memory_bytes"), [("dgx-h100:1", TIGHT)])
def test_solving_every_point_finds_nothing_better(text: str, memory_bytes: int) -> None:
    """Brute force over the grid: each point's joint problem to the end, nothing pruned."""
    graph, cluster, options = small(), cluster_of(text, memory_bytes), SearchOptions(force={"pp": 1})
    result = search(graph, cluster, options)
    registry = default_registry()
    tables = ProblemTables(graph, cluster, options, registry)
    every = grid_points(graph, cluster.size, devices_per_node(cluster), {}, registry)
    assert len(every) == len(result.solutions)
    steps = []
    for point in every:
        attempt = MeshSolver(graph, tables.problem(point), (), 1e-6, MeshSolution(point))
        attempt.solve_with_memory(20.0)
        if attempt.result.solved and attempt.result.plan is not None:
            steps.append(attempt.result.plan.evaluation.step_seconds)
    best = min(steps)
    assert result.lower_bound_seconds <= best * (1 + 1e-9)
    assert best >= result.evaluation.step_seconds * (1 - result.gap - 1e-6)
    assert result.gap == pytest.approx(1 - result.lower_bound_seconds / result.evaluation.step_seconds, abs=1e-9)


@pytest.mark.parametrize("seed", [0])
def test_the_bound_against_exhaustion(seed: int) -> None:
    """All strategies and conversion trees, on every mesh without a data axis, by a search that is not the solver's."""
    graph, cluster = drawn_graph(seed, calls=1), replace(Cluster.parse("dgx-h100:1"), size=4)
    result = search(graph, cluster, SearchOptions(force={"dp": 1, "pp": 1}))
    best = min(
        point.micro_batches * Exhaustion(part, point.mesh, cluster, Precision()).best_seconds()
        for point in (each.point for each in result.solutions)
        for part in (replace(graph, batch=graph.batch // point.micro_batches),)
    )
    assert result.lower_bound_seconds <= best * (1 + 1e-6)


class Stop:
    """Progress that is interrupted at the n-th solved candidate."""

    def __init__(self, after: int) -> None:
        self.after, self.lines = after, list[str]()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if " s, " in line and "best" in line:
            self.after -= 1
            if self.after == 0:
                raise KeyboardInterrupt


def stopped() -> tuple[PlanResult, Stop]:
    progress = Stop(1)
    return search(small(), cluster_of("local:4"), SearchOptions(), progress), progress


def test_an_interrupt_leaves_the_best_so_far() -> None:
    result, progress = stopped()
    assert result.status is Status.FEASIBLE
    assert result.evaluation.fits
    assert 0 <= result.lower_bound_seconds <= result.evaluation.step_seconds
    assert any("interrupted" in line for line in progress.lines)


def test_an_interrupt_before_any_plan_is_an_interrupt() -> None:
    def at_once(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(small(), cluster_of("local:4"), SearchOptions(), at_once)


def test_the_time_limit_leaves_a_plan_and_an_honest_gap() -> None:
    """Baselines are priced in any case; what was not looked at keeps its bound, which may be nothing."""
    result = search(small(), cluster_of("local:4"), SearchOptions(time_limit_seconds=0.05))
    assert result.status is Status.FEASIBLE
    assert result.gap == pytest.approx(1 - result.lower_bound_seconds / result.evaluation.step_seconds)
    full = search(small(), cluster_of("local:4"), SearchOptions())
    assert result.lower_bound_seconds <= full.evaluation.step_seconds
