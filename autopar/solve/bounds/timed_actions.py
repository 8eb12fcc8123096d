"""The clock of a schedule as rows of a linear program: when each action ends, as a sum of durations."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.schedule import Schedule
from autopar.schedules.clock import ScheduleClock


@dataclass(frozen=True, slots=True)
class TimedAction:
    """It takes what is in a `slot` of the clock's table, after the action `before` on its stage, and after what it waits for from
    another stage (`after`, over `cut`). -1: there is none."""

    before: int
    after: int
    cut: int
    slot: int


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """`ends`: the last of `actions` on each stage."""

    actions: tuple[TimedAction, ...]
    ends: tuple[int, ...]


def timed_schedule(schedule: Schedule) -> TimedSchedule:
    """PlanError where the schedule has a deadlock."""
    clock = ScheduleClock.of(schedule)
    out: list[TimedAction] = []
    latest = [-1] * len(clock.busy)
    for place, (rank, slot, after, cut, *_) in enumerate(clock.steps):
        # what is on the same stage comes before it there
        out.append(TimedAction(latest[rank], after if cut >= 0 else -1, cut, slot))
        latest[rank] = place
    return TimedSchedule(tuple(out), tuple(latest))
