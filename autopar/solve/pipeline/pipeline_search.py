"""The pipelines of the grid that are solved: an estimate of each point with each of its schedules says which are worth
partitioning; those with the least estimates are partitioned, and priced by the evaluator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf

from autopar.cost_models.step.stage_devices import cluster_for_bounds
from autopar.errors import AutoparError
from autopar.ir.mesh import DATA_AXIS
from autopar.solve.forked import Lookahead
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.pipeline.pipeline_bounds import PipelineBounds
from autopar.solve.pipeline.stage_placement import FamilyPlacement
from autopar.solve.pipeline.stage_search import StageSearch
from autopar.solve.search_state import SearchPoint, SearchState
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption, schedule_options

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


Estimates = list[tuple[float, GridPoint, ScheduleOption]]

_MAX_FAMILIES = 40
"""Families of points that are placed: a third of a second each where their blocks are large."""


def rank_pipelines(
    search: StageSearch, bounds: PipelineBounds, points: Sequence[SearchPoint], best_seconds: float, most_seconds: float
) -> Estimates:
    """Return the estimated step of each point with each of its schedules, the shortest first, where it is below `most_seconds`.
    Left out before that is what takes `best_seconds` by bounds, or by an estimate without the memory constraint. At most
    `_MAX_FAMILIES` families of points are placed, those with the least bounds first. AutoparError where a forced schedule fits
    none of the points."""
    estimates = _Ranking(search, bounds, points, best_seconds, most_seconds).run()
    return sorted(estimates, key=lambda each: (each[0], each[1].stages, each[2].virtual))


class _Ranking:
    """The estimates of one search. `ratios`: what larger micro-batches showed of smaller ones, where these are never faster.
    `beyond`: what memory and the communication of state add to the bound of a point, which no bubble makes longer."""

    def __init__(
        self,
        search: StageSearch,
        bounds: PipelineBounds,
        points: Sequence[SearchPoint],
        best_seconds: float,
        most_seconds: float,
    ) -> None:
        self.search, self.placement, self.bounds = search, search.placement, bounds
        self.best_seconds, self.most_seconds = best_seconds, most_seconds
        self.points = {each.point: each for each in points}
        self.seconds = {each.point: each.bound_seconds for each in points}
        self.beyond: dict[GridPoint, float] = {}
        self.ratios = BoundRatios(search.graph.batch)
        self.ratios_hold = cluster_for_bounds(search.cluster) == search.cluster
        order = sorted(self.points, key=lambda each: (self.seconds[each], -each.examples(search.graph.batch)))
        self.schedules = {point: bounds.schedules(point) for point in order}
        if not any(self.schedules.values()):
            for point in sorted(order, key=lambda each: -each.micro_batches)[:1]:
                schedule_options(search.graph, point, search.options.force, search.options.schedule)  # says why not

    def run(self) -> Estimates:
        """Estimate point by point; other processes begin with the placements of the next ones."""
        out: Estimates = []
        search, options = self.search, self.search.options
        order, placed = list(self.schedules), 0
        with Lookahead(self._placement, options.processes) as ahead:
            for number, point in enumerate(order):
                if search.seconds_left() <= 0:
                    break
                if not self._open_schedules(point):
                    continue
                try:
                    if not self.placement.knows(point):
                        if placed == _MAX_FAMILIES:
                            continue
                        if self.best_seconds < inf:
                            self.beyond[point] = self.bounds.with_memory(self.points[point]) - self.seconds[point]
                        if not self._open_schedules(point):
                            continue
                        upcoming = self._unknown_families(point, order[number + 1 :])
                        placed += 1
                        self.placement.learn(point, ahead.result(point, upcoming))
                    out += self._estimates(point)
                except AutoparError:
                    if options.force or options.schedule:
                        raise
        return out

    def _least(self, point: GridPoint, option: ScheduleOption) -> float:
        shared = max(1.0, self.search.cluster.device.ranks_per_core)
        return self.seconds[point] * max(1.0, bubble_factor(point, option) / shared)

    def _open_schedules(self, point: GridPoint) -> list[ScheduleOption]:
        """Return the schedules that bound, bubble and ratios do not prune."""
        every = self.schedules[point]
        most = self.best_seconds - self.beyond.get(point, 0.0)
        return [each for each in every if self._least(point, each) * self.ratios.least(point, each) < most]

    def _unknown_families(self, point: GridPoint, order: Sequence[GridPoint]) -> Iterator[GridPoint]:
        """Yield the first point of each other family that may be placed."""
        seen = {self.placement.family(point)}
        for each in order:
            if self.placement.family(each) not in seen and not self.placement.knows(each) and self._open_schedules(each):
                seen.add(self.placement.family(each))
                yield each

    def _placement(self, point: GridPoint) -> FamilyPlacement:
        fastest = self.placement.place(point, fastest=True)
        if fastest is not None:
            seconds = (self.search.estimate(fastest, each, inf) for each in self._open_schedules(point))
            if any(each < self.best_seconds for each in seconds):
                self.placement.place(point)
        return self.placement.family_placement(point)

    def _estimates(self, point: GridPoint) -> Estimates:
        """Estimate without the memory constraint, which prunes the next ones; and under it."""
        fastest = self.placement.place(point, fastest=True)
        if fastest is None:
            return []
        seconds = {each: self.search.estimate(fastest, each, inf) for each in self._open_schedules(point)}
        if self.ratios_hold:
            self.ratios.learn(point, {each: estimate / self._least(point, each) for each, estimate in seconds.items()})
        schedules = [each for each, estimate in seconds.items() if estimate < self.best_seconds]
        placed = self.placement.place(point) if schedules else None
        if placed is None:
            return []
        estimates = ((self.search.estimate(placed, each), point, each) for each in schedules)
        return self._as_run(point, [each for each in estimates if each[0] < self.most_seconds])

    def _as_run(self, point: GridPoint, estimates: Estimates) -> Estimates:
        """Estimate again what runs slower than under most schedules (which the tables of these say first, since they prune)."""
        search = self.search
        placed = next((search.placed(point, each) for *_, each in estimates if search.runs_apart(each)), None)
        if placed is None:
            return estimates
        again = [search.estimate(placed, each) if search.runs_apart(each) else seconds for seconds, _, each in estimates]
        pairs = zip(again, estimates, strict=True)
        return [(seconds, point, each) for seconds, (_, _, each) in pairs if seconds < self.most_seconds]


def bubble_factor(point: GridPoint, option: ScheduleOption) -> float:
    """Return the ratio of the step with its bubble to that of the fullest stage."""
    return 1 + option.bubble_passes * (point.stages - 1) / point.micro_batches


class BoundRatios:
    """The ratios of estimates without memory to bounds that larger micro-batches of a stage mesh showed. A bound is of the
    largest micro-batch: smaller ones take as much longer at least, by the example."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._known: dict[object, list[tuple[int, ScheduleOption, float]]] = {}

    def least(self, point: GridPoint, option: ScheduleOption) -> float:
        """Return the ratio that larger micro-batches showed of this schedule, or of any."""
        known = [each for each in self._known.get(self._key(point), ()) if each[0] >= point.examples(self._batch)]
        same = [ratio for _, of, ratio in known if (of.schedule, of.virtual) == (option.schedule, option.virtual)]
        return max(1.0, max(same, default=0.0) or min((ratio for *_, ratio in known), default=1.0))

    def learn(self, point: GridPoint, ratios: Mapping[ScheduleOption, float]) -> None:
        """Note that the schedules of `point` take so many times what its bound with their bubble says."""
        self._known.setdefault(self._key(point), []).extend((point.examples(self._batch), *each) for each in ratios.items())

    @staticmethod
    def _key(point: GridPoint) -> object:
        return point.mesh.axes[1:], point.mesh.size_of(DATA_AXIS) > 1
