"""The report of a search: a line for each solution, the certified result, and why nothing was found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from autopar.errors import Infeasible, PlanError
from autopar.ir.describe import cut_short_text
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.infeasible import explanation
from autopar.solve.problem.forced_axes import forced_axes, forced_axis_notes
from autopar.solve.problem.pins import constraint_texts
from autopar.solve.result import PlanResult
from autopar.solve.search_state import SearchState
from autopar.solve.space.grid import least_memory_points
from autopar.solve.space.pipeline_grid import pipeline_asked

_MESHES = 8
"""Meshes that are solved for what an infeasible problem lacks."""


def report_grid(state: SearchState) -> None:
    """Report how many candidates there are."""
    points, pipelines = state.mesh_points, state.pipeline_points
    meshes = {each.point.mesh for each in points}
    piped = f", {len(pipelines)} pipelines" if pipelines else ""
    state.progress(f"grid: {len(points)} candidates on {len(meshes)} meshes of {state.cluster.size} devices{piped}")


def report_solution(state: SearchState, solution: MeshSolution) -> None:
    """Report a solution in one line."""
    priced = solution.plan.evaluation if solution.plan is not None else None
    size = f"{priced.step_seconds:.4g} s, {priced.peak_memory_bytes / 2**30:.1f} GiB" if priced is not None else ""
    if solution.solved:
        text = f"{solution.status:10} {size}"
    elif solution.shortage_bytes:
        text = f"{solution.status:10} short of {solution.shortage_bytes / 2**30:.1f} GiB per device"
    elif size:
        text = f"too large  {size}: to be solved under the memory limit"
    else:
        text = str(solution.status)
    best = f"; best {state.best_seconds():.4g} s" if state.best is not None else ""
    gap = f", gap {100 * state.gap():.1f} %" if state.best is not None and state.lower_bound_seconds() > 0 else ""
    state.progress(f"{solution!s:36} {text}{best}{gap}")


def result_of(state: SearchState, best: MeshSolution, interrupted: bool) -> PlanResult:
    """Return the best plan with its certificate. What was not solved is pruned by its bound, or says why it was not tried, unless
    time ended before it was left out."""
    assert best.plan is not None
    whole = not interrupted and state.seconds_left() > 0
    for each in state.points:
        if not each.done and (whole or each.left_out):
            each.solution.leave(state.best_seconds(), state.options.min_improvement, state.why_not_tried(each))
    priced = (each for each in state.fitting if each.point.stages > 1)  # of which a point has one for each schedule
    solutions = [*(each.solution for each in state.points), *priced]
    pruned, not_tried = (sum(each.status is status for each in solutions) for status in (Status.PRUNED, Status.NOT_TRIED))
    solved = sum(each.solved for each in solutions)
    state.progress(
        f"{len(solutions)} candidates: {solved} solved, {pruned} pruned by bounds, {not_tried} not tried, "
        f"{sum(each.status is Status.INFEASIBLE for each in solutions)} do not fit; gap {100 * state.gap():.2g} %"
    )
    for line in _forced_axis_notes(state, best):
        warnings.warn(line, stacklevel=2)
    cut_short = _limit(state, interrupted)
    if cut_short:
        state.progress(cut_short_text(cut_short))
    proven = not interrupted and all(each.status is not Status.TIMEOUT for each in solutions)
    return PlanResult(
        graph=best.plan.graph or state.graph,
        candidate=best.plan.candidate,
        evaluation=best.plan.evaluation,
        status=Status.OPTIMAL if proven and best.status is Status.OPTIMAL else Status.FEASIBLE,
        lower_bound_seconds=state.lower_bound_seconds(),
        gap=state.gap(),
        solutions=tuple(solutions),
        alternatives=tuple(state.fitting),
        cut_short=cut_short,
        warnings=tuple(warning for each in solutions for warning in each.warnings),
    )


def _limit(state: SearchState, interrupted: bool) -> str:
    """Say what ended the search before its own limits did."""
    if interrupted:
        return "an interrupt"
    return f"the time limit of {state.options.time_limit_seconds:g} s" if state.out_of_time else ""


def raise_infeasible(state: SearchState, pipeline_refusal: str) -> None:
    """Raise Infeasible, with what is short and which changes would do; PlanError where plans were left out that do not obey a
    forced degree, pipelines by `pipeline_refusal`."""
    refused = next((each.solution.refusal for each in state.points if each.solution.refusal), pipeline_refusal)
    if refused:
        pinned = "; ".join(constraint_texts(state.options.pins))
        raise PlanError(f"{refused}; pinned are {pinned}" if pinned else refused)
    if pipeline_asked(state.options.force, state.options.schedule):
        if state.seconds_left() <= 0:
            raise Infeasible(_out_of_time(state))
        raise Infeasible(explanation(state.graph, state.cluster, state.options, state.registry))
    if any(each.solution.status is Status.TIMEOUT for each in state.mesh_points):
        raise Infeasible(_out_of_time(state))
    raise Infeasible(explanation(state.graph, state.cluster, state.options, state.registry, _nearest_solvers(state)))


def _out_of_time(state: SearchState) -> str:
    return f"no plan for {state.graph.name} within {state.options.time_limit_seconds:g} s: raise the time limit"


def _forced_axis_notes(state: SearchState, best: MeshSolution) -> Iterator[str]:
    """Yield what sizes forbid a forced axis of the best plan to shard."""
    axes = forced_axes(best.point.mesh, state.options.force)
    if axes:
        yield from forced_axis_notes(state.problem(best.point), axes, constraint_texts(state.options.pins))


def _nearest_solvers(state: SearchState) -> list[MeshSolver]:
    """Return solvers of what lacks least, and by how much: per mesh the smallest micro-batches, all state sharded."""
    solutions = {each.point: each.solution for each in state.mesh_points}
    out = []
    for point in sorted(least_memory_points(solutions), key=lambda each: len(each.mesh.axes))[:_MESHES]:
        solver = state.solver(state.tables.problem(point), solutions[point])
        solver.result.shortage_bytes = solver.shortage_bytes()
        out.append(solver)
    return out
