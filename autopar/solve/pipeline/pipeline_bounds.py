"""The bounds of the pipelines of the grid, cheap ones first: of all points whose stages have the same model axes, then of one
point under any schedule with memory and state, then under each of its schedules in more and more detail.

A bound of a mesh is one of every pipeline whose stages have its model axes: of ``m`` micro-batches of ``b`` examples through
``p`` stages, the stage that works longest takes at least ``m x work(b) / p``, which is ``batch x ranks of the model axes /
devices x work(b) / b``, the same for all p; and work(b) / b is least for the largest b. It holds for every cut and every
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import PlanError
from autopar.ir.mesh import Axis
from autopar.solve.bounds.block_relaxation import relax_blocks
from autopar.solve.bounds.flow_bound import FlowRelaxation, operation_bound
from autopar.solve.pipeline.schedule_bound import ScheduleDetail
from autopar.solve.pipeline.stage_relaxation import (
    RelaxedCalls,
    StageRelaxation,
    call_seconds,
    operation_calls,
    relaxed_calls,
    with_traded_lines,
)
from autopar.solve.search_state import SearchPoint, SearchState
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption, schedule_options
from autopar.solve.tighten import BoundTask

_MOST_TASKS = {ScheduleDetail.COARSE: 400, ScheduleDetail.FINE: 100, ScheduleDetail.CLOCK: 12}
"""Tasks of each kind: they take some 10 ms, 40 ms and half a second."""


@dataclass(slots=True)
class _ScheduleBound:
    """The bound of some points under one schedule, and the details in which it was not looked at."""

    option: ScheduleOption
    seconds: float = 0.0
    details: list[ScheduleDetail] = field(default_factory=lambda: list(ScheduleDetail))


@dataclass(frozen=True, slots=True)
class _PointGroup:
    """Points that differ in the groups of ranks that share state only: one bound for all of them under each schedule is nearly as
    sharp."""

    members: list[SearchPoint]
    schedules: list[_ScheduleBound]


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """The bounds of points under one schedule and under any, and the relaxation of their calls (None: that was not needed)."""

    seconds: float
    under_any_schedule: float
    relaxation: RelaxedCalls | None


class PipelineBounds:
    """The bounds of all pipelines of a search. `tasks_left`: tasks of each detail that may still be done."""

    def __init__(self, state: SearchState) -> None:
        self.state, self.graph, self.cluster = state, state.pipeline_graph, state.cluster
        self.mixed_devices = len({group.device for group in self.cluster.groups}) > 1
        self.tasks_left = dict(_MOST_TASKS)
        self._groups: dict[GridPoint, _PointGroup] = {}
        self._relaxed: dict[object, RelaxedCalls] = {}
        self._operations: dict[GridPoint, RelaxedCalls] = {}
        self._least: dict[GridPoint, float] = {}
        self._mesh_relaxations: dict[object, StageRelaxation] = {}
        self._memory_bounds: dict[GridPoint, float] = {}

    def bound(self, points: Sequence[SearchPoint]) -> None:
        """Bound every point by those of its family."""
        families: dict[tuple[Axis, ...], list[SearchPoint]] = {}
        for each in points:
            families.setdefault(each.point.mesh.axes[1:], []).append(each)
        for members in families.values():
            self._bound_family(members)

    def _bound_family(self, members: Sequence[SearchPoint]) -> None:
        """Bound points whose stages have the same model axes by the least of what is known of micro-batches at least as large;
        where nothing is, the tables of the largest one."""
        state = self.state
        largest = max((each.point for each in members), key=lambda point: (point.examples(self.graph.batch), point.stages))
        axes, most = self.family(largest)
        known = [seconds for (of, examples), seconds in state.facts.pipeline_seconds.items() if of == axes and examples >= most]
        bound = max(known, default=0.0)
        if not known or self.mixed_devices:
            problem = state.problem(largest, state.cluster_for_bounds)
            bound = operation_bound(problem) / largest.stages
            if bound < state.best_seconds():
                bound = max(bound, FlowRelaxation(problem).bound(state.seconds_left()) / largest.stages)
        for each in members:
            each.raise_bound(bound)

    def family(self, point: GridPoint) -> tuple[tuple[Axis, ...], int]:
        """Return what points of one relaxation have in common."""
        return point.mesh.axes[1:], point.examples(self.graph.batch)

    # -- one point

    def tasks(self, each: SearchPoint, enough: float) -> Iterator[BoundTask]:
        """Yield what raises the bound of a point: what holds for any schedule, where its calls are not relaxed; then the schedule
        that limits it, in more detail. None follow one that limits it whatever is done."""
        family = self.family(each.point)
        if not self._is_bounded(each.point) and family not in self._relaxed:
            yield BoundTask(each.point, None, True, partial(self.with_memory, each), lambda seconds: None)
            return
        group = self._group(each)
        for schedule in sorted(group.schedules, key=lambda schedule: schedule.seconds):
            if schedule.seconds >= enough or not schedule.details or not self.tasks_left[schedule.details[0]]:
                return
            detail = schedule.details[0]
            relaxation = self._relaxed.get(family)
            makes = None if relaxation is not None and relaxation.serves(detail) else family
            yield BoundTask(
                key=(group.members[0].point, schedule.option, detail),
                makes=makes,
                is_quick=makes is None and detail is not ScheduleDetail.CLOCK,  # a copy takes as long as one of FINE detail
                run=partial(self._report, group, schedule.option, detail),
                take=partial(self._take, group, schedule),
            )

    def _group(self, each: SearchPoint) -> _PointGroup:
        if not self._groups:
            groups: dict[GridPoint, list[SearchPoint]] = {}
            for other in self.state.pipeline_points:
                if not other.done:
                    groups.setdefault(replace(other.point, zero_group=0), []).append(other)
            self._groups = {
                key: _PointGroup(members, list(map(_ScheduleBound, self.schedules(members[0].point))))
                for key, members in groups.items()
            }
        return self._groups[replace(each.point, zero_group=0)]

    def schedules(self, point: GridPoint) -> Sequence[ScheduleOption]:
        """Return the schedules of a point; none where it has too few micro-batches for a forced one."""
        try:
            return schedule_options(self.graph, point, self.state.options.force, self.state.options.schedule)
        except PlanError:
            return ()

    def _report(self, group: _PointGroup, option: ScheduleOption, detail: ScheduleDetail) -> ScheduleReport:
        points = [each.point for each in group.members]
        least, seconds = self.schedule_bound(points, option, detail, self.state.best_seconds())
        return ScheduleReport(seconds, least, self._relaxed.get(self.family(points[0])))

    def _take(self, group: _PointGroup, schedule: _ScheduleBound, report: ScheduleReport) -> None:
        if report.relaxation is not None:
            self._relaxed[self.family(group.members[0].point)] = report.relaxation
        self.tasks_left[schedule.details.pop(0)] -= 1
        schedule.seconds = max(schedule.seconds, report.seconds)
        for each in group.schedules:
            each.seconds = max(each.seconds, report.under_any_schedule)
        for member in group.members:
            member.raise_bound(min(each.seconds for each in group.schedules))

    def with_memory(self, each: SearchPoint) -> float:
        """Raise the bound of a point to its `mesh_bound`, and return that, once."""
        if each.point not in self._memory_bounds:
            self._memory_bounds[each.point] = self.mesh_bound(each.point, each.bound_seconds)
            each.raise_bound(self._memory_bounds[each.point])
        return self._memory_bounds[each.point]

    def _is_bounded(self, point: GridPoint) -> bool:
        """Return whether `mesh_bound` was taken, or says less than the point's own tables, of the largest micro-batch."""
        return point in self._memory_bounds or self._largest(point) == point.micro_batches

    def _largest(self, point: GridPoint) -> int:
        """The fewest micro-batches on its mesh of which its own are parts."""
        same_mesh = (each.point.micro_batches for each in self.state.points if each.point.mesh == point.mesh)
        return min(count for count in same_mesh if point.micro_batches % count == 0)

    def mesh_bound(self, point: GridPoint, flow_seconds: float) -> float:
        """Bound a point by the seconds of its calls, with memory and the communication of state, by the tables of the largest
        micro-batch on its mesh: a call of a smaller one takes at least its share."""
        largest = replace(point, micro_batches=self._largest(point))
        key = largest.mesh, largest.micro_batches
        if key not in self._mesh_relaxations:
            problem = self.state.problem(largest, self.state.cluster_for_bounds)
            calls = {name: call_seconds(problem, name, 0.0) for name in problem.blocks}
            self._mesh_relaxations[key] = StageRelaxation(problem, RelaxedCalls(0.0, relax_blocks(problem), calls), self.cluster)
        relaxation = self._mesh_relaxations[key]
        share = largest.micro_batches / point.micro_batches
        calls = {name: each.part(share) for name, each in relaxation.relaxed.calls.items()}
        relaxed = replace(relaxation.relaxed, flow_seconds=flow_seconds, calls=calls)
        return replace(relaxation, relaxed=relaxed).under_any_schedule(point) / self._ranks_per_core

    def schedule_bound(
        self, members: Sequence[GridPoint], option: ScheduleOption, detail: ScheduleDetail, best_seconds: float
    ) -> tuple[float, float]:
        """Return the bounds of points that differ in `zero_group` only, under any schedule, and under this one. Operations alone
        first: those of small micro-batches often say enough."""
        point, shared, key = members[0], self._ranks_per_core, self.family(members[0])
        problem, seconds_left = self.state.problem(point), self.state.seconds_left
        at = replace(point, zero_group=0)  # not its family: which of its points comes first differs between processes
        if key not in self._relaxed:
            if at not in self._operations:
                self._operations[at] = operation_calls(problem, point.stages)
            operations = self._operations[at]
            least = StageRelaxation(problem, operations, self.cluster).least_under_any_schedule(members) / shared
            if least >= best_seconds * (1 - self.state.options.sharp_gap):
                return least, least
            self._relaxed[key] = relaxed_calls(problem, point.stages, operations.blocks, seconds_left)
        if not self._relaxed[key].serves(detail):
            self._relaxed[key] = with_traded_lines(problem, self._relaxed[key], seconds_left)
        relaxation = StageRelaxation(problem, self._relaxed[key], self.cluster)
        if at not in self._least:
            self._least[at] = relaxation.least_under_any_schedule(members) / shared
        least = self._least[at]
        if least >= best_seconds:
            return least, least
        return least, max(least, relaxation.under_schedule(members, option, detail) / shared)

    @property
    def _ranks_per_core(self) -> float:
        """The factor by which a step is at most shorter than its schedule's clock (`schedules.shared_cores`)."""
        return max(1.0, self.cluster.device.ranks_per_core)
