"""Placements, state, recomputation and the host decided together: against exhaustion, against one after the other, and the
evaluator's memory beside the rows'."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.blocks import gpt2_graph
from support.candidates import drawn_candidate
from support.joint import best_seconds, priced_plans, toy_graph
from support.replays import with_kept
from support.solving import mesh_of

from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve import ilp
from autopar.solve.candidates import Attempt, MeshResult
from autopar.solve.decode import decode
from autopar.solve.formulate import formulate
from autopar.solve.formulation import Formulation
from autopar.solve.memory import limit
from autopar.solve.problem import Problem, build

BF16 = Precision("bfloat16", "float32")
NODE = Cluster.parse("dgx-h100:1")


def problem_of(graph: Graph, mesh: Mesh, cluster: Cluster, micro_batches: int = 1) -> Problem:
    return build(graph, mesh, cluster, BF16, "adamw", default_registry(), micro_batches=micro_batches)


def with_memory(problem: Problem, size: float) -> Problem:
    device = replace(problem.cluster.device, memory_bytes=int(size))
    return replace(problem, cluster=replace(problem.cluster, device=device))


def solved(problem: Problem, gap: float = 1e-6) -> tuple[Formulation, ilp.Outcome]:
    made = formulate(problem, replay=True)
    limit(made)
    return made, ilp.solve(made.model, relative_gap=gap)


def attempt(problem: Problem) -> MeshResult:
    result = MeshResult(problem.mesh)
    Attempt(problem.graph, problem, (), 1e-7, result).limited(60)
    assert not result.warnings
    return result


def sample(parts: int, host: bool = True, size: int = 4) -> Problem:
    cluster = replace(NODE, size=size, host=NODE.host if host else None)
    return problem_of(toy_graph(batch=8 // parts), mesh_of(dp=size), cluster, parts)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_optimum_of_all_plans(host: bool, parts: int) -> None:
    """What is kept, made again or on the host, times state sharding per block: every combination by the evaluator."""
    problem = sample(parts, host)
    plans = priced_plans(problem)
    peaks = sorted({found.peak_memory_bytes for _, found in plans})
    assert len(plans) >= 64 and len(peaks) >= 12
    for capacity in (peaks[0], peaks[len(peaks) // 6], peaks[len(peaks) // 2], peaks[-1]):
        result = attempt(with_memory(problem, capacity))
        assert result.solved and result.evaluation is not None
        assert result.evaluation.step_seconds == pytest.approx(best_seconds(plans, capacity), rel=1e-6)
        assert result.bound_seconds <= result.evaluation.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_no_row_forbids_a_plan_that_fits(seed: int) -> None:
    """Random placements with random tensors kept: within the memory that such a plan takes, the solver finds one as fast."""
    cluster = replace(NODE, size=4)
    graph, mesh = toy_graph(batch=4, seq=256), mesh_of(dp=2, tp=2)
    drawn = with_kept(graph, drawn_candidate(graph, mesh, seed), cluster, seed, share=0.5, offload=0.2)
    drawn = replace(drawn, precision=BF16, batch=graph.batch)
    found = evaluate(graph, drawn, cluster)
    problem = with_memory(problem_of(graph, mesh, cluster), found.peak_memory_bytes)
    made, outcome = solved(problem)
    assert outcome.values
    assert outcome.bound * made.second_unit <= found.step_seconds * (1 + 1e-6)


def small_gpt2() -> Graph:
    return gpt2_graph(layers=3, dtype="bfloat16", batch=8, hidden=256, heads=8, seq=512, vocabulary=1024)


def least(problem: Problem) -> tuple[float, Candidate]:
    """The smallest peak by the rows (bytes of tensors), and its plan."""
    device = problem.cluster.device
    made = formulate(with_memory(problem, device.base_bytes), replay=True)
    limit(made, minimise_excess=True)
    outcome = ilp.solve(made.model, relative_gap=1e-7)
    return outcome.objective * made.byte_unit * (1 + device.allocator_slack), decode(made, outcome.values)


CASES = [(dict(dp=8), True), (dict(dp=8), False), (dict(dp=2, tp=4), False), (dict(dp=1, tp=8), True)]


@pytest.mark.parametrize("axes, host", CASES)
def test_under_any_limit_it_fits_and_costs_what_the_solver_said(axes: dict[str, int], host: bool) -> None:
    """The rows' least peak is the evaluator's within 2 %; between it and the fastest plan's, seconds agree, and it fits."""
    graph, cluster = small_gpt2(), replace(NODE, host=NODE.host if host else None)
    problem = problem_of(graph, mesh_of(**axes), cluster)
    base = cluster.device.base_bytes
    rows, smallest = least(problem)
    low = evaluate(graph, smallest, cluster, costs=problem.batch_costs).peak_memory_bytes
    assert 0.98 * (low - base) <= rows <= (low - base) * (1 + 1e-6)
    high = evaluate(graph, decode(*_values(with_memory(problem, 2**50))), cluster, costs=problem.batch_costs).peak_memory_bytes
    for share in (0.05, 0.4):
        tight = with_memory(problem, low + share * (high - low) + 1)
        made, outcome = solved(tight)
        candidate = decode(made, outcome.values)
        verify_candidate(graph, candidate, cluster.size)
        found = evaluate(graph, candidate, tight.cluster, costs=problem.batch_costs)
        assert found.fits
        assert found.step_seconds == pytest.approx(outcome.objective * made.second_unit, rel=1e-5)


def _values(problem: Problem) -> tuple[Formulation, tuple[float, ...]]:
    made, outcome = solved(problem)
    return made, outcome.values


def one_after_the_other(problem: Problem) -> float:
    """Seconds where strategies and conversions are those of the fastest plan without a limit, and the rest is decided after."""
    free = formulate(problem)
    fastest = ilp.solve(free.model, relative_gap=1e-7)
    made = formulate(problem, replay=True)
    limit(made)
    for group in (*made.x.values(), *made.w.values(), *made.y.values()):
        for column in group:
            made.model.lower[column] = made.model.upper[column] = round(fastest.values[column])
    return ilp.solve(made.model, relative_gap=1e-6).objective * made.second_unit


def test_sharding_first_and_recomputation_afterwards_is_slower() -> None:
    """Four calls cut over four devices, without a host. The fastest placements keep tensors whole; what fits without them runs
    products again: 455 us (405 us with a little more memory). Together, other placements keep less: 406 us (390 us)."""
    graph, cluster = toy_graph(batch=4, seq=512, width=1024), replace(NODE, size=4, host=None)
    problem = problem_of(graph, mesh_of(dp=1, tp=4), cluster)
    low = evaluate(graph, least(problem)[1], cluster).peak_memory_bytes
    high = evaluate(graph, decode(*_values(with_memory(problem, 2**50))), cluster).peak_memory_bytes
    for share, times in ((0.5, 1.08), (0.7, 1.02)):
        tight = with_memory(problem, low + share * (high - low))
        found = attempt(tight).evaluation
        assert found is not None and found.fits
        assert times * found.step_seconds < one_after_the_other(tight) < float("inf")


def test_nothing_waits_on_the_host_without_need() -> None:
    """A fifth less memory than the fastest plan takes needs the host or a second run; that plan needs neither."""
    graph = small_gpt2()
    problem = problem_of(graph, mesh_of(dp=8), NODE)
    free = attempt(with_memory(problem, 2**50))
    assert free.candidate is not None and free.evaluation is not None
    assert not any(plan.offload or plan.again for plan in free.candidate.blocks)
    base = NODE.device.base_bytes
    pressed = attempt(with_memory(problem, base + (free.evaluation.peak_memory_bytes - base) * 0.8)).candidate
    assert pressed is not None and any(plan.offload or plan.again for plan in pressed.blocks)
