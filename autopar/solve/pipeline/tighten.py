"""The order in which bounds of pipelines are tightened: always the schedule of a point that the least bound is made of, up to a
number of programs.

A point first gets what holds for any schedule, then the schedule that limits it is bounded in more and more detail. Other
processes begin with what may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.solve.forked import Lookahead
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_bound import RelaxedCalls
from autopar.solve.pipeline.stage_program import ScheduleDetail
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption

Points = tuple[GridPoint, ...]
"""Points that differ in the groups of ranks that share state only: one bound for all of them is nearly as sharp."""

Task = tuple[Points, ScheduleOption, ScheduleDetail]


@dataclass(frozen=True, slots=True)
class TightenedBounds:
    """The result of a task: seconds of its schedule, those `under_any_schedule`, and the relaxation of the point's calls (None:
    that was not needed)."""

    seconds: float
    under_any_schedule: float
    relaxation: RelaxedCalls | None


@dataclass(frozen=True, slots=True)
class TighteningSteps:
    """The callbacks of a tightening: `bound_any_schedule` bounds one point by what holds for any schedule (`is_bounded`: where
    that was done or is not worth it), `schedules` lists those of some points, `bound_schedule` does a task. `family` names points
    of one relaxation, and `relaxations` has the known ones."""

    bound_any_schedule: Callable[[GridPoint], float]
    is_bounded: Callable[[GridPoint], bool]
    schedules: Callable[[Points], Sequence[ScheduleOption]]
    bound_schedule: Callable[[Task], TightenedBounds]
    family: Callable[[GridPoint], object]
    relaxations: dict[object, RelaxedCalls]


_MOST_TASKS = {ScheduleDetail.COARSE: 400, ScheduleDetail.FINE: 100, ScheduleDetail.CLOCK: 12}
"""Tasks of each kind: they take some 10 ms, 40 ms and half a second."""


class BoundTightening:
    """A tightening of `points`, whose bounds it raises until the least one is `enough_seconds`. `tasks_left`: tasks that may
    still be done."""

    def __init__(self, points: Mapping[GridPoint, MeshSolution], steps: TighteningSteps, enough_seconds: float) -> None:
        self.points, self.steps, self.enough_seconds = points, steps, enough_seconds
        self.tasks_left = dict(_MOST_TASKS)
        self.groups = _points_with_one_bound(points)
        self._bounds: dict[Points, dict[ScheduleOption, float]] = {}
        self._done: set[Task] = set()
        self._tasks: dict[Task, Task] = {}

    def run(self, seconds_left: Callable[[], float], processes: int) -> None:
        """Raise bounds until nothing is left to do, or no task or time is."""
        with Lookahead(self.steps.bound_schedule, processes, self._has_relaxation) as ahead:
            while seconds_left() > 0:
                order = self._order()
                if not order:
                    return
                point, family = order[0], self.steps.family(order[0])
                if not self.steps.is_bounded(point) and family not in self.steps.relaxations:
                    self.steps.bound_any_schedule(point)
                    continue
                task = next(self._tasks_of(self.groups[point]), None)
                if task is None or not self.tasks_left[task[2]]:
                    return
                quick = self._is_quick(task)
                self._take(task, self.steps.bound_schedule(task) if quick else ahead.result(task, self._upcoming(order, task)))
                self.tasks_left[task[2]] -= 1

    def _order(self) -> list[GridPoint]:
        able = (point for point, result in self.points.items() if result.status is not Status.INFEASIBLE)
        low = (point for point in able if self.points[point].bound_seconds < self.enough_seconds)
        return sorted(low, key=lambda point: self.points[point].bound_seconds)

    def _tasks_of(self, members: Points) -> Iterator[Task]:
        """Yield the tasks that are left for some points, those that limit them first. None follow a schedule that limits them
        whatever is done."""
        if members not in self._bounds:
            self._bounds[members] = dict.fromkeys(self.steps.schedules(members), 0.0)
        bounds = self._bounds[members]
        for option in sorted(bounds, key=lambda each: bounds[each]):
            if bounds[option] >= self.enough_seconds:
                return
            tasks = ((members, option, detail) for detail in ScheduleDetail)
            task = next((each for each in tasks if each not in self._done), None)
            if task is None:
                return
            yield self._tasks.setdefault(task, task)  # always the same object, which is how `Lookahead` knows it

    def _upcoming(self, order: list[GridPoint], task: Task) -> Iterator[Task]:
        """Yield the tasks that others may begin beside `task`, those that take longer than a copy of this process: of each family
        that is not relaxed one at most."""
        busy = set[object]()
        self._waits(task, busy)
        for members in dict.fromkeys(self.groups[point] for point in order if self.steps.is_bounded(point)):
            for each in self._tasks_of(members):
                if each is not task and not self._is_quick(each) and not self._waits(each, busy) and self.tasks_left[each[2]]:
                    yield each

    def _is_quick(self, task: Task) -> bool:
        """Return whether a task is one small program: a copy of this process takes as long as one of FINE detail."""
        return task[2] is not ScheduleDetail.CLOCK and self._has_relaxation(task)

    def _has_relaxation(self, task: Task) -> bool:
        """Return whether a task finds the relaxation of its family that it needs, or makes it of its own point."""
        relaxation = self.steps.relaxations.get(self.steps.family(task[0][0]))
        return relaxation is not None and relaxation.serves(task[2])

    def _waits(self, task: Task, busy: set[object]) -> bool:
        """Return whether a task waits for a relaxation that another one makes; if not, it may make one."""
        family = self.steps.family(task[0][0])
        if self._has_relaxation(task):
            return False
        waits = family in busy
        busy.add(family)
        return waits

    def _take(self, task: Task, bounds: TightenedBounds) -> None:
        members, option, _ = task
        if bounds.relaxation is not None:
            self.steps.relaxations[self.steps.family(members[0])] = bounds.relaxation
        known = self._bounds[members]
        for each, seconds in known.items():
            known[each] = max(seconds, bounds.under_any_schedule, bounds.seconds if each == option else 0.0)
        self._done.add(task)
        for point in members:
            raise_bound(self.points[point], min(known.values(), default=inf))


def raise_bound(result: MeshSolution, seconds: float) -> None:
    """Raise a bound, which only grows; infinite where nothing fits."""
    result.bound_seconds = max(result.bound_seconds, seconds)
    if seconds == inf:
        result.status = Status.INFEASIBLE


def _points_with_one_bound(points: Mapping[GridPoint, MeshSolution]) -> dict[GridPoint, Points]:
    """Return with each point those that share a bound with it."""
    groups: dict[GridPoint, list[GridPoint]] = {}
    for point, result in points.items():
        if result.status is not Status.INFEASIBLE:
            groups.setdefault(replace(point, zero_group=0), []).append(point)
    return {point: members for members in map(tuple, groups.values()) for point in members}
