"""The pipeline that takes least memory under what is forced, by the stage search: it tells by how much a forced pipeline does not
fit, and fits where the faster partitions do not.

Of each stage mesh it takes the smallest micro-batches and the schedule with the fewest in flight; the dynamic program then
minimises the fullest stage's bytes in place of its seconds, over all options of the frontier (which end in full recomputation)
and all ZeRO stages.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.rules.registry import Registry
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.pipeline.stage_search import StageSearch
from autopar.solve.search_state import SearchState
from autopar.solve.space.grid import GridPoint, least_memory_points
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import schedule_options

_MOST_MESHES = 6
"""Stage meshes that are looked at, few axes first."""


def least_memory_pipeline(
    graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry
) -> PricedPlan | None:  # fmt: skip
    """Return the pipeline with the least peak memory by the evaluator, or the first that fits; None where there is none."""
    try:
        everything = replace(options, batch=0, registry=registry, time_limit_seconds=inf)
        state = SearchState(graph, cluster, everything, lambda line: None)
        state.list_points()
    except AutoparError:
        return None
    best: PricedPlan | None = None
    search = StageSearch(state.pipeline_graph, cluster, state.options, state.pipeline_tables, state.seconds_left)
    points = least_memory_points(each.point for each in state.pipeline_points)
    for point in sorted(points, key=lambda each: (each.stages, len(each.mesh.axes)))[:_MOST_MESHES]:
        if best is not None and best.evaluation.fits:
            break
        try:
            plan = _least(search, point)
        except AutoparError:
            continue
        if plan is None or not plan.obeys(options.force):
            continue
        if best is None or plan.evaluation.peak_memory_bytes < best.evaluation.peak_memory_bytes:
            best = plan
    return best


def _least(stages: StageSearch, point: GridPoint) -> PricedPlan | None:
    options = stages.options
    schedules = schedule_options(stages.graph, point, options.force, options.schedule)
    option = min(schedules, key=lambda each: (each.in_flight, each.virtual), default=None)
    return stages.solve_with_least_memory(point, option) if option is not None else None
