"""The clock of a schedule as rows of a linear program: when some of its actions end, at least, as sums of durations.

Of the micro-batches only some are looked at, on all chunks: what a stage does between two of their actions counts with its
durations, and what the others wait for is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import Schedule
from autopar.schedules.clock import ScheduleClock

SLOTS = 7
"""Durations of a chunk on the clock."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """It ends after the action `before` on its stage by `busy` (how often each slot of the clock's table), and after what it
    waits for (`after`, over `cut`) by its own `slot`. -1: there is none."""

    before: int
    busy: Mapping[int, int]
    after: int
    cut: int
    slot: int


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """`ends`: per stage the last of `actions`, and what the stage computes after it."""

    actions: tuple[TimedAction, ...]
    ends: tuple[tuple[int, Mapping[int, int]], ...]


def outer_micro_batches(stages: int, micro_batches: int) -> frozenset[int]:
    """The first and the last of every group that stages take together."""
    return frozenset(each for each in range(micro_batches) if each % stages in (0, stages - 1)) | {micro_batches - 1}


def timed_schedule(schedule: Schedule, micro_batches: Collection[int]) -> TimedSchedule:
    """The actions of these micro-batches. PlanError where the schedule has a deadlock."""
    clock = ScheduleClock.of(schedule)
    out: list[TimedAction] = []
    numbers: dict[int, int] = {}
    latest = [-1] * len(clock.busy)
    busy: list[Counter[int]] = [Counter() for _ in clock.busy]
    for place, ((rank, slot, after, cut, *_), cell) in enumerate(zip(clock.steps, clock.cells, strict=True)):
        busy[rank][slot] += 1
        if clock.schedule.ranks[rank][cell].micro_batch not in micro_batches:
            continue
        # what is on the same stage comes before it there
        waits = numbers[after] if after >= 0 and cut >= 0 else -1
        out.append(TimedAction(latest[rank], busy[rank], waits, cut, slot))
        numbers[place] = latest[rank] = len(out) - 1
        busy[rank] = Counter()
    return TimedSchedule(tuple(out), tuple(zip(latest, busy, strict=True)))
