"""The clock of a schedule as rows of a linear program: when its actions end, as sums of durations.

Of a long schedule only some micro-batches are looked at, on all chunks: what a stage does between two of their actions counts
with its durations, and what the others wait for is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import Schedule
from autopar.schedules.clock import ScheduleClock


@dataclass(frozen=True, slots=True)
class TimedAction:
    """One action on the clock. It ends after the action `before` on its stage by what the stage does until then (`busy`: how
    often each slot of the clock's table), and after what it waits for from another stage (`after`, over `cut`) by its own `slot`.
    -1: there is none."""

    before: int
    busy: Mapping[int, int]
    after: int
    cut: int
    slot: int


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """The actions of a schedule. `ends`: per stage the last of `actions`, and what the stage does after it."""

    actions: tuple[TimedAction, ...]
    ends: tuple[tuple[int, Mapping[int, int]], ...]


def spread_micro_batches(stages: int, micro_batches: int, share: float) -> frozenset[int]:
    """About this share of them, at least the first and the last of every group that stages take together."""
    each = max(2, round(share * stages))
    places = {round(number * (stages - 1) / (each - 1)) for number in range(each)}
    return frozenset(number for number in range(micro_batches) if number % stages in places) | {micro_batches - 1}


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
