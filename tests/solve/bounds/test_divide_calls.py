"""Equal calls with two plans: what is chosen fits and is faster, and the bound is below every such plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from solve.test_joint import NODE, problem_of, with_memory
from support.oracles.exhaustive_plans import priced_plans, toy_graph
from support.plans.mesh import mesh_of

from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.plan import Candidate
from autopar.ir.verify import verify_candidate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.problem.divide_calls import divide_calls
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint

CALLS = 5


def problem_of_calls(seq: int = 512, width: int = 512) -> Problem:
    return problem_of(toy_graph(seq=seq, width=width, calls=CALLS), mesh_of(dp=4), replace(NODE, size=4, host=None))


def relaxation(problem: Problem) -> float | None:
    """The bound of a point in seconds."""
    return MeshSolver(problem.graph, problem, (), 1e-7, MeshSolution(GridPoint(problem.mesh))).relax_with_memory(60)


def solve(problem: Problem) -> tuple[MeshSolution, float]:
    """The solution of a point, and its step in seconds before calls were divided."""
    solver = MeshSolver(problem.graph, problem, (), 1e-7, MeshSolution(GridPoint(problem.mesh)))
    solver.solve_with_memory(60)
    seconds = solver.result.step_seconds
    assert seconds is not None
    solver.divide_calls(60)
    return solver.result, seconds


def divisions(problem: Problem, plans: list[Candidate]) -> Iterator[Evaluation]:
    """Every plan whose layers take two of these plans, in every order."""
    graph = problem.graph
    for one, other in permutations(plans, 2):
        for mask in range(2**CALLS):
            layers = iter(range(CALLS))
            each = [
                (one if call.block != "Middle" or mask >> next(layers) & 1 else other).block(call.block) for call in graph.calls
            ]
            variants, blocks, originals = with_stage_variants(graph, each)
            costs = {name: problem.batch_costs[original] for name, original in originals.items()}
            yield evaluate(variants, replace(one, blocks=blocks), problem.cluster, problem.optimizer, costs)


def test_some_layers_are_recomputed_where_not_all_need_be() -> None:
    """Between the peaks of the plans that treat all layers alike."""
    problem = problem_of_calls()
    peaks = sorted({round(each.peak_memory_bytes) for _, each in priced_plans(problem)})
    faster = 0
    for low, high in pairwise(peaks):
        tight = with_memory(problem, (low + high) / 2)
        result, seconds = solve(tight)
        assert result.plan is not None and result.plan.evaluation.fits
        assert result.bound_seconds <= result.plan.evaluation.step_seconds * (1 + 1e-9)
        assert result.plan.evaluation.step_seconds <= seconds
        graph = result.plan.graph or problem.graph
        verify_candidate(graph, result.plan.candidate, 4)
        assert evaluate(graph, result.plan.candidate, tight.cluster, tight.optimizer) == result.plan.evaluation
        faster += result.plan.evaluation.step_seconds < seconds * (1 - 1e-6)
    assert faster, "none was better than plans that treat all layers alike"


@pytest.mark.parametrize(("seq", "width"), [(512, 512), (128, 1024)])
def test_the_bound_is_below_every_division(seq: int, width: int) -> None:
    """Plans that treat all layers alike are slower than some of them at these limits. Transfers of the second graph's wide
    weights take longer than its compute."""
    problem = problem_of_calls(seq, width)
    plans = priced_plans(problem)
    frontier = [
        candidate
        for candidate, each in plans
        if not any(e.peak_memory_bytes < each.peak_memory_bytes and e.step_seconds <= each.step_seconds for _, e in plans)
    ][:6]
    every = [*divisions(problem, frontier), *(each for _, each in plans)]
    peaks = sorted({round(each.peak_memory_bytes) for _, each in plans})
    better = 0
    for low, high in pairwise(peaks):
        limit = (low + high) / 2
        result, _ = solve(with_memory(problem, limit))
        best = min(each.step_seconds for each in every if each.peak_memory_bytes <= limit)
        better += best < min(each.step_seconds for _, each in plans if each.peak_memory_bytes <= limit) * (1 - 1e-6)
        assert result.bound_seconds <= best * (1 + 1e-9)
    assert better


def test_a_mesh_keeps_its_bound_where_equal_layers_do_not_fit() -> None:
    """Plans that treat them differently may fit: it is not shown to be infeasible."""
    problem = problem_of_calls(128, 1024)
    tight = with_memory(problem, 0.999 * min(each.peak_memory_bytes for _, each in priced_plans(problem)))
    solver = MeshSolver(tight.graph, tight, (), 1e-7, MeshSolution(GridPoint(tight.mesh)))
    solver.solve_with_memory(60)
    assert solver.result.status is Status.NOT_TRIED
    assert solver.result.bound_seconds == relaxation(tight)


def test_plans_that_do_not_agree_between_calls_are_not_divided() -> None:
    problem = problem_of_calls()
    plan = solve(problem)[0].plan
    assert plan is not None
    other = replace(plan.candidate, blocks=tuple(replace(block, inputs=block.outputs[:0]) for block in plan.candidate.blocks))

    def price(*_: object) -> Evaluation:
        raise AssertionError("no such plan is priced")

    assert divide_calls(problem.boundary, plan.candidate, other, price) is None
