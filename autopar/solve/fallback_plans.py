"""Plans where the search ended with none that fits."""

from __future__ import annotations

from math import inf

from autopar.solve.bounds.minimum_memory import MinimumMemory
from autopar.solve.bounds.warm_start import WarmStart
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.least_memory import least_memory_pipeline
from autopar.solve.problem.forced_axes import forced_axes, why_disobeyed
from autopar.solve.search_state import SearchState

_MAX_POINTS = 8
"""Points that are tried for a plan where the time limit left none."""


def least_memory_solution(state: SearchState) -> MeshSolution | None:
    """The pipeline of layers dealt evenly that recomputes all, or the one whose stages are partitioned for least memory, where
    none that the stage search makes fits: its estimates of memory err on the safe side."""
    search = MinimumMemory(state.registry, 1, least_memory_pipeline)
    memory_plan = search.fitting_plan(state.graph, state.cluster, state.options)
    return memory_plan.solution() if memory_plan is not None and memory_plan.obeys(state.options.force) else None


def warm_start_solution(state: SearchState) -> MeshSolution | None:
    """Return one sharding that fits for forced degrees whose problems were too large for the time; it obeys them too."""
    plans = WarmStart(state.graph, state.cluster, state.options, state.tables, lambda: inf)
    for each in [each for each in state.mesh_points if each.solution.status is Status.TIMEOUT][:_MAX_POINTS]:
        plan = plans.fastest_fitting(each.point)
        axes = forced_axes(each.point.mesh, state.options.force)
        if plan is None or plan.candidate is None or why_disobeyed(state.tables.problem(each.point), plan.candidate, axes):
            continue
        plan.bound_seconds = each.bound_seconds
        each.solution = plan
        return plan
    return None
