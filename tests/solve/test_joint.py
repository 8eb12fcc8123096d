"""Placements, state sharding, recomputation and offloading decided jointly: against exhaustion, against one after the other, and
the memory rows against the evaluator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.harness.end_to_end import prepare
from support.models.handwritten_blocks import gpt2_graph
from support.oracles.exhaustive_plans import best_seconds, priced_plans, toy_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_memory import saved_storages
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.tensors.sizes import PlacedValue
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.formulation import Formulation
from autopar.solve.ilp.memory_events import add_memory_constraint
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.ilp.storages import storage_names
from autopar.solve.problem.problem import Problem, build_problem
from autopar.solve.space.grid import GridPoint

BF16 = Precision("bfloat16", "float32")
_WHOLE = Cluster.parse("dgx-h100:1")
_DEVICE = replace(_WHOLE.device, communicator_bytes=0, matmul_fraction=0.575, attention_fraction=0.204, bandwidth_fraction=0.53)
NODE = replace(_WHOLE, device=_DEVICE)
"""One node, with fractions of its own: what is said of toy graphs is of these."""


def problem_of(graph: Graph, mesh: Mesh, cluster: Cluster, micro_batches: int = 1) -> Problem:
    return build_problem(graph, mesh, cluster, BF16, "adamw", default_registry(), micro_batches=micro_batches)


def with_memory(problem: Problem, size: float) -> Problem:
    device = replace(problem.cluster.device, memory_bytes=int(size))
    return replace(problem, cluster=replace(problem.cluster, device=device))


def solved(problem: Problem, gap: float = 1e-6) -> tuple[Formulation, ilp.Outcome]:
    form = formulate(problem, recompute=True)
    add_memory_constraint(form)
    return form, ilp.solve(form.model, relative_gap=gap)


def attempt(problem: Problem) -> MeshSolution:
    result = MeshSolution(GridPoint(problem.mesh))
    MeshSolver(problem.graph, problem, (), 1e-7, result).solve_with_memory(60)
    assert not result.warnings
    return result


def sample(micro_batches: int, host: bool = True, size: int = 4) -> Problem:
    cluster = replace(NODE, size=size, host=NODE.host if host else None)
    return problem_of(toy_graph(batch=8 // micro_batches), mesh_of(dp=size), cluster, micro_batches)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_optimum_of_all_plans(host: bool, micro_batches: int) -> None:
    """What is saved, recomputed or offloaded, times state sharding per block: every combination by the evaluator."""
    problem = sample(micro_batches, host)
    plans = priced_plans(problem)
    peaks = sorted({found.peak_memory_bytes for _, found in plans})
    assert len(plans) >= 64 and len(peaks) >= 12
    for capacity in (peaks[0], peaks[len(peaks) // 6], peaks[len(peaks) // 2], peaks[-1]):
        result = attempt(with_memory(problem, capacity))
        assert result.solved and result.step_seconds is not None
        assert result.step_seconds == pytest.approx(best_seconds(plans, capacity), rel=1e-6)
        assert result.bound_seconds <= result.step_seconds * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_no_row_forbids_a_plan_that_fits(seed: int) -> None:
    """Random placements with random tensors saved: within the memory that such a plan takes, the solver finds one as fast."""
    cluster = replace(NODE, size=4)
    graph, mesh = toy_graph(batch=4, seq=256), mesh_of(dp=2, tp=2)
    drawn = with_kept(graph, drawn_candidate(graph, mesh, seed), cluster, seed, share=0.5, offload=0.2)
    drawn = replace(drawn, precision=BF16, batch=graph.batch)
    found = evaluate(graph, drawn, cluster)
    problem = with_memory(problem_of(graph, mesh, cluster), found.peak_memory_bytes)
    form, outcome = solved(problem)
    assert outcome.values
    assert outcome.bound * form.second_unit <= found.step_seconds * (1 + 1e-6)


def small_gpt2() -> Graph:
    return gpt2_graph(layers=3, dtype="bfloat16", batch=8, hidden=256, heads=8, seq=512, vocabulary=1024)


def least(problem: Problem) -> tuple[float, Candidate]:
    """The least peak memory by the rows (bytes of tensors), and its plan."""
    device = problem.cluster.device
    form = formulate(with_memory(problem, device.base_bytes), recompute=True)
    add_memory_constraint(form, minimise_excess=True)
    outcome = ilp.solve(form.model, relative_gap=1e-7)
    return outcome.objective * form.byte_unit, decode(form, outcome.values)


CASES = [
    (dict(dp=8), True),
    (dict(dp=8), False),
    pytest.param(dict(dp=2, tp=4), False, marks=pytest.mark.slow),
    (dict(dp=1, tp=8), True),
]


@pytest.mark.parametrize("axes, host", CASES)
def test_under_any_limit_it_fits_and_costs_what_the_solver_said(axes: dict[str, int], host: bool) -> None:
    """The rows' least peak is the evaluator's within 2 %; between it and the fastest plan's, seconds agree, and it fits (with as
    much less memory for the rows as they lack at the least peak, as the search solves again with less)."""
    graph, cluster = small_gpt2(), replace(NODE, host=NODE.host if host else None)
    problem = problem_of(graph, mesh_of(**axes), cluster)
    base = cluster.device.base_bytes
    rows, minimum = least(problem)
    low = evaluate(graph, minimum, cluster, costs=problem.batch_costs).peak_memory_bytes
    assert 0.98 * (low - base) <= rows <= (low - base) * (1 + 1e-6)
    high = evaluate(graph, decode(*_values(with_memory(problem, 2**50))), cluster, costs=problem.batch_costs).peak_memory_bytes
    for share in (0.05, 0.4):
        limit = low + share * (high - low) + 1
        tight = with_memory(problem, limit)
        form, outcome = solved(with_memory(problem, limit - (low - base - rows)))
        candidate = decode(form, outcome.values)
        verify_candidate(graph, candidate, cluster.size)
        found = evaluate(graph, candidate, tight.cluster, costs=problem.batch_costs)
        assert found.fits
        assert found.step_seconds == pytest.approx(outcome.objective * form.second_unit, rel=1e-5)


def _values(problem: Problem) -> tuple[Formulation, tuple[float, ...]]:
    form, outcome = solved(problem)
    return form, outcome.values


def one_after_the_other(problem: Problem) -> float:
    """Seconds where strategies and conversions are those of the fastest plan without a limit, and the rest is decided after."""
    free = formulate(problem)
    fastest = ilp.solve(free.model, relative_gap=1e-7)
    form = formulate(problem, recompute=True)
    add_memory_constraint(form)
    for group in (*form.x.values(), *form.w.values(), *form.y.values()):
        for column in group:
            form.model.lower[column] = form.model.upper[column] = round(fastest.values[column])
    return ilp.solve(form.model, relative_gap=1e-6).objective * form.second_unit


def test_sharding_first_and_recomputation_afterwards_is_slower() -> None:
    """Four calls over four devices, without a host. The fastest placements save whole tensors; to fit, they recompute products:
    455 us (405 us with a little more memory). Decided together, other placements save less: 406 us (390 us)."""
    graph, cluster = toy_graph(batch=4, seq=512, width=1024), replace(NODE, size=4, host=None)
    problem = problem_of(graph, mesh_of(dp=1, tp=4), cluster)
    low = evaluate(graph, least(problem)[1], cluster).peak_memory_bytes
    high = evaluate(graph, decode(*_values(with_memory(problem, 2**50))), cluster).peak_memory_bytes
    for share, times in ((0.5, 1.08), (0.7, 1.02)):
        tight = with_memory(problem, low + share * (high - low))
        found = attempt(tight)
        assert found.solved and found.step_seconds is not None
        assert times * found.step_seconds < one_after_the_other(tight) < float("inf")


def test_nothing_is_offloaded_without_need() -> None:
    """A fifth less memory than the fastest plan takes needs offloading or recomputation; that plan needs neither."""
    graph = small_gpt2()
    problem = problem_of(graph, mesh_of(dp=8), NODE)
    free = attempt(with_memory(problem, 2**50))
    assert free.plan is not None
    assert not any(block.offload or block.recompute_nodes for block in free.plan.candidate.blocks)
    base = NODE.device.base_bytes
    pressed = attempt(with_memory(problem, base + (free.plan.evaluation.peak_memory_bytes - base) * 0.8)).plan
    assert pressed is not None and any(block.offload or block.recompute_nodes for block in pressed.candidate.blocks)


def test_a_storage_has_the_bytes_of_every_strategy_that_saves_it() -> None:
    """Experts of all tokens save more beside their operands than those of some ranks' tokens: the largest size would forbid plans
    that fit."""
    problem = problem_of(prepare("mixtral").graph, mesh_of(dp=2, ep=2), replace(NODE, size=4))
    extras = 0
    for table in problem.blocks.values():
        sizes: dict[PlacedValue, float] = {}
        names = storage_names(table)
        for strategies in table.strategies.values():
            for strategy in strategies:
                for storage, size in saved_storages(table.costs, names, strategy.plan):
                    assert sizes.setdefault(storage, size) == size, storage
                    extras += storage[0].endswith("+")
    assert extras
