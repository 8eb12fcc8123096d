"""The order in which bounds are tightened: always a point that has the least bound of all, meshes and pipelines alike, by the
task that its bound is short of. Other processes begin with what may come next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.solve.forked import Lookahead
from autopar.solve.search_state import SearchPoint, SearchState


@dataclass(frozen=True, slots=True)
class BoundTask:
    """A task that raises the bounds of some points: `run` may be called on a copy of this process, `take` gets its report on this
    one. `makes`: what it makes that other tasks wait for (None: it needs no more than there is). `is_quick`: it takes no longer
    than a copy of this process."""

    key: Hashable
    makes: Hashable
    is_quick: bool
    run: Callable[[], Any] = field(compare=False)
    take: Callable[[Any], None] = field(compare=False)


TasksOfPoint = Callable[[SearchPoint, float], Iterator[BoundTask]]
"""The tasks that raise the bound of a point as long as it is below these seconds, what limits it first."""


def tighten(state: SearchState, tasks: TasksOfPoint) -> None:
    """Raise the least bound of all points until it is within `sharp_gap` of the best plan, or no task raises it."""
    enough = state.best_seconds() * (1 - state.options.sharp_gap)
    with Lookahead[BoundTask, Any](lambda task: task.run(), state.options.processes) as ahead:
        while state.seconds_left() > 0:
            low = (each for each in state.feasible_points() if each.bound_seconds < enough)
            order = sorted(low, key=lambda each: each.bound_seconds)
            task = next((task for each in order[:1] for task in tasks(each, enough)), None)
            if task is None:
                return
            upcoming = (other for each in order for other in tasks(each, enough))
            task.take(task.run() if task.is_quick else ahead.result(task, tasks_beside(task, upcoming)))


def tasks_beside(task: BoundTask, upcoming: Iterator[BoundTask]) -> Iterator[BoundTask]:
    """Yield the tasks that others may begin beside `task`: those that take longer than a copy, and wait for no other one."""
    busy = {task.makes}
    for each in upcoming:
        if each != task and not each.is_quick and (each.makes is None or each.makes not in busy):
            busy.add(each.makes)
            yield each
