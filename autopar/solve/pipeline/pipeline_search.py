"""The pipelines of the grid that are solved: those with the least estimates are partitioned, and priced by the evaluator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.pipeline.pipeline_bounds import PipelineBounds
from autopar.solve.pipeline.pipeline_ranking import rank_pipelines
from autopar.solve.pipeline.stage_search import StageSearch
from autopar.solve.search_state import SearchPoint, SearchState

_MOST_PRICED = 16
"""At most so many pipelines are partitioned and priced."""

_MOST_PER_MESH = 4
"""And at most so many of one stage mesh and number of stages, unless one of them is the best."""

_WORTH_PRICING = 1.04
"""Estimates that are not above the best plan by more than that are worth pricing."""


class PipelineSearch:
    """The search over pipelines, whose points stand for all of their schedules."""

    def __init__(self, state: SearchState) -> None:
        self.state, self.bounds = state, PipelineBounds(state)
        tables = state.pipeline_tables
        self.stage_search = StageSearch(state.pipeline_graph, state.cluster, state.options, tables, state.seconds_left)

    def solve(self, points: Sequence[SearchPoint]) -> Iterator[MeshSolution]:
        """Partition and price the points with the least estimates that bounds do not prune; yield the pipelines that fit."""
        state, tried, count = self.state, Counter[object](), 0
        pending = {each.point: each for each in points if state.is_open(each)}
        enough = state.best_seconds() * (1 - state.options.min_improvement)
        estimates = rank_pipelines(self.stage_search, self.bounds, list(pending.values()), enough, enough * _WORTH_PRICING)
        for each in pending.values() if state.seconds_left() > 0 else ():
            each.left_out = "estimated to be no faster than the best plan then"
        for seconds, point, _ in reversed(estimates):
            pending[point].left_out = f"estimated at {seconds:.4g} s, and enough others were priced before"
        for seconds, point, option in estimates:
            key = point.mesh, point.stages
            if seconds >= state.best_seconds() * _WORTH_PRICING or state.seconds_left() <= 0 or count >= _MOST_PRICED:
                return
            if tried[key] >= _MOST_PER_MESH:
                continue
            tried[key] += 1
            count += 1
            pending[point].left_out = "the partitions that were priced do not fit, or are listed with their schedules"
            plan = self.stage_search.solve_point(point, option, state.best_seconds())
            if plan is not None:
                solution = plan.solution(pending[point].bound_seconds)
                yield solution
                if state.best is solution:
                    tried[key] = 0
