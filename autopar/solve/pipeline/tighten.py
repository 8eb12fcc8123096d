"""The order in which bounds of pipelines are tightened: always the one that the least bound is made of, up to a number of tasks.

A point first gets what holds for any schedule, then each of its schedules by some paths, then the schedules that limit it, one
after the other, by their clock. Other processes begin with what may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from autopar.solve.forked import Lookahead
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.ilp.solver import Status
from autopar.solve.pipeline.pipeline_bound import RelaxedCalls
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption

Points = tuple[GridPoint, ...]
"""Points that differ in the groups of ranks that share state only: one bound for all of them is nearly as sharp."""

Task = tuple[Points, ScheduleOption | None]
"""One schedule by its clock, or all of them by some paths."""


@dataclass(frozen=True, slots=True)
class TightenedBounds:
    """The result of a task: seconds by schedule, and the relaxation of the point's calls (None: that was not needed)."""

    seconds: Mapping[ScheduleOption, float]
    relaxation: RelaxedCalls | None


@dataclass(frozen=True, slots=True)
class TighteningSteps:
    """The callbacks of a tightening: `bound_any_schedule` bounds one point by what holds for any schedule (`is_bounded`: where
    that was done or is not worth it), `bound_schedules` does a task. `family` names points of one relaxation, and `relaxations`
    has the known ones."""

    bound_any_schedule: Callable[[GridPoint], float]
    is_bounded: Callable[[GridPoint], bool]
    bound_schedules: Callable[[Task], TightenedBounds]
    family: Callable[[GridPoint], object]
    relaxations: dict[object, RelaxedCalls]


_MOST_RELAXED, _MOST_TIMED = 24, 12
"""Tasks of each kind: half a second each where the blocks are large."""


class BoundTightening:
    """A tightening of `points`, whose bounds it raises until the least one is `enough_seconds`. `tasks_left`: tasks that may
    still be done, of those for all schedules (False) and of those by the clock of one (True)."""

    def __init__(self, points: Mapping[GridPoint, MeshSolution], steps: TighteningSteps, enough_seconds: float) -> None:
        self.points, self.steps, self.enough_seconds = points, steps, enough_seconds
        self.tasks_left = {False: _MOST_RELAXED, True: _MOST_TIMED}
        self.groups = _points_with_one_bound(points)
        self._bounds: dict[Points, dict[ScheduleOption, float]] = {}
        self._clocked: set[Task] = set()
        self._tasks: dict[Task, Task] = {}

    def run(self, seconds_left: Callable[[], float], processes: int) -> None:
        """Raise bounds until nothing is left to do, or no task or time is."""
        with Lookahead(self.steps.bound_schedules, processes, self._has_relaxation) as ahead:
            while seconds_left() > 0:
                order = self._order()
                if not order:
                    return
                point, family = order[0], self.steps.family(order[0])
                if not self.steps.is_bounded(point) and family not in self.steps.relaxations:
                    self.steps.bound_any_schedule(point)
                    continue
                task = next(self._tasks_of(self.groups[point]), None)
                if task is None or not self.tasks_left[task[1] is not None]:
                    return
                self._take(task, ahead.result(task, self._upcoming(order, task)))
                self.tasks_left[task[1] is not None] -= 1

    def _order(self) -> list[GridPoint]:
        able = (point for point, result in self.points.items() if result.status is not Status.INFEASIBLE)
        low = (point for point in able if self.points[point].bound_seconds < self.enough_seconds)
        return sorted(low, key=lambda point: self.points[point].bound_seconds)

    def _tasks_of(self, members: Points) -> Iterator[Task]:
        """Yield the tasks that are left for some points, those that limit them first."""
        if members not in self._bounds:
            yield self._task(members, None)
            return
        bounds = self._bounds[members]
        for option in sorted(bounds, key=lambda each: bounds[each]):
            if bounds[option] >= self.enough_seconds or (members, option) in self._clocked:
                return
            yield self._task(members, option)

    def _task(self, members: Points, option: ScheduleOption | None) -> Task:
        """Return a task, always the same object, which is how `Lookahead` knows it."""
        return self._tasks.setdefault((members, option), (members, option))

    def _upcoming(self, order: list[GridPoint], task: Task) -> Iterator[Task]:
        """Yield the tasks that others may begin beside `task`: of each family that is not relaxed one task at most."""
        busy = set[object]()
        self._waits(task, busy)
        for members in dict.fromkeys(self.groups[point] for point in order if self.steps.is_bounded(point)):
            for each in self._tasks_of(members):
                if each is not task and not self._waits(each, busy) and self.tasks_left[each[1] is not None]:
                    yield each

    def _has_relaxation(self, task: Task) -> bool:
        """Return whether a task finds the relaxation of its family, or makes it of its own point."""
        return self.steps.family(task[0][0]) in self.steps.relaxations

    def _waits(self, task: Task, busy: set[object]) -> bool:
        """Return whether a task waits for a relaxation that another one makes; if not, it may make one."""
        family = self.steps.family(task[0][0])
        if task[1] is not None or self._has_relaxation(task):
            return False
        waits = family in busy
        busy.add(family)
        return waits

    def _take(self, task: Task, bounds: TightenedBounds) -> None:
        members, option = task
        if bounds.relaxation is not None:
            self.steps.relaxations[self.steps.family(members[0])] = bounds.relaxation
        self._bounds.setdefault(members, {}).update(bounds.seconds)
        if option is not None:
            self._clocked.add(task)
        for point in members:
            raise_bound(self.points[point], min(self._bounds[members].values(), default=inf))


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
