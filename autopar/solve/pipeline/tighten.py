"""The order in which bounds of pipelines are sharpened: always what the least bound is made of, up to a number of tasks.

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
class Sharpened:
    """What a task found: seconds by schedule, and the relaxation of the point's calls (None: that was not needed)."""

    seconds: Mapping[ScheduleOption, float]
    relaxed: RelaxedCalls | None


@dataclass(frozen=True, slots=True)
class Sharpening:
    """How a bound is sharpened: `roughly` one point by what holds for any schedule (`is_known`: where that was done or is not
    worth it), `sharply` a task. `family`: points of one relaxation, of which `relaxed` holds those that are known."""

    roughly: Callable[[GridPoint], float]
    is_known: Callable[[GridPoint], bool]
    sharply: Callable[[Task], Sharpened]
    family: Callable[[GridPoint], object]
    relaxed: dict[object, RelaxedCalls]


_MOST_RELAXED, _MOST_TIMED = 24, 12
"""Tasks of each kind: half a second each where the blocks are large."""


class BoundTightening:
    """Of `points`, whose bounds it raises until the least one is `enough_seconds`. `left`: tasks that may still be done, of those
    for all schedules (False) and of those by the clock of one (True)."""

    def __init__(self, points: Mapping[GridPoint, MeshSolution], how: Sharpening, enough_seconds: float) -> None:
        self.points, self.how, self.enough_seconds = points, how, enough_seconds
        self.left = {False: _MOST_RELAXED, True: _MOST_TIMED}
        self.together = _alike(points)
        self._found: dict[Points, dict[ScheduleOption, float]] = {}
        self._timed: set[Task] = set()
        self._tasks: dict[Task, Task] = {}

    def run(self, seconds_left: Callable[[], float], processes: int) -> None:
        """Until nothing is left to do, or no task or time is."""
        with Lookahead(self.how.sharply, processes, self._is_relaxed) as ahead:
            while seconds_left() > 0:
                order = self._order()
                if not order:
                    return
                point, family = order[0], self.how.family(order[0])
                if not self.how.is_known(point) and family not in self.how.relaxed:
                    self.how.roughly(point)
                    continue
                task = next(self._tasks_of(self.together[point]), None)
                if task is None or not self.left[task[1] is not None]:
                    return
                self._take(task, ahead.result(task, self._upcoming(order, task)))
                self.left[task[1] is not None] -= 1

    def _order(self) -> list[GridPoint]:
        able = (point for point, result in self.points.items() if result.status is not Status.INFEASIBLE)
        low = (point for point in able if self.points[point].bound_seconds < self.enough_seconds)
        return sorted(low, key=lambda point: self.points[point].bound_seconds)

    def _tasks_of(self, members: Points) -> Iterator[Task]:
        """What is left to do for some points, what limits them first."""
        if members not in self._found:
            yield self._task(members, None)
            return
        found = self._found[members]
        for option in sorted(found, key=lambda each: found[each]):
            if found[option] >= self.enough_seconds or (members, option) in self._timed:
                return
            yield self._task(members, option)

    def _task(self, members: Points, option: ScheduleOption | None) -> Task:
        """Always the same object, which is how `Lookahead` knows it."""
        return self._tasks.setdefault((members, option), (members, option))

    def _upcoming(self, order: list[GridPoint], task: Task) -> Iterator[Task]:
        """What others may begin beside `task`: of each family that is not relaxed one task at most."""
        busy = set[object]()
        self._waits(task, busy)
        for members in dict.fromkeys(self.together[point] for point in order if self.how.is_known(point)):
            for each in self._tasks_of(members):
                if each is not task and not self._waits(each, busy) and self.left[each[1] is not None]:
                    yield each

    def _is_relaxed(self, task: Task) -> bool:
        """Whether a task finds the relaxation of its family, or makes it of its own point."""
        return self.how.family(task[0][0]) in self.how.relaxed

    def _waits(self, task: Task, busy: set[object]) -> bool:
        """For a relaxation that another task makes; if not, it may make one."""
        family = self.how.family(task[0][0])
        if task[1] is not None or self._is_relaxed(task):
            return False
        waits = family in busy
        busy.add(family)
        return waits

    def _take(self, task: Task, sharpened: Sharpened) -> None:
        members, option = task
        if sharpened.relaxed is not None:
            self.how.relaxed[self.how.family(members[0])] = sharpened.relaxed
        self._found.setdefault(members, {}).update(sharpened.seconds)
        if option is not None:
            self._timed.add(task)
        for point in members:
            raise_bound(self.points[point], min(self._found[members].values(), default=inf))


def raise_bound(result: MeshSolution, seconds: float) -> None:
    """Bounds only grow; infinite where nothing fits."""
    result.bound_seconds = max(result.bound_seconds, seconds)
    if seconds == inf:
        result.status = Status.INFEASIBLE


def _alike(points: Mapping[GridPoint, MeshSolution]) -> dict[GridPoint, Points]:
    """With each point those that share a bound with it."""
    groups: dict[GridPoint, list[GridPoint]] = {}
    for point, result in points.items():
        if result.status is not Status.INFEASIBLE:
            groups.setdefault(replace(point, zero_group=0), []).append(point)
    return {point: members for members in map(tuple, groups.values()) for point in members}
