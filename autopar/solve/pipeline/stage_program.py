"""A lower bound of a pipeline under one schedule: a linear program that deals the calls to the chunks, and chooses what each
chunk saves and recomputes and how its state is sharded, so that the longest of the schedule's paths is shortest and every stage
fits.

It has no placements: a call takes what `bounds.call_lines` and `bounds.call_state` say at least. Every path bounds every
partition, so the program's value is a bound from the start; the schedule's clock shows longer paths at the program's durations,
which are added, a few times (Kelley, The cutting-plane method for solving convex programs, 1960).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from autopar.cost_models.hardware.overlap import Overlap
from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.solve.bounds.call_lines import DurationLine, SavedLine
from autopar.solve.bounds.call_state import CallState
from autopar.solve.ilp.linear_model import INFINITY, LinearModel
from autopar.solve.ilp.solver import Status, solve
from autopar.solve.pipeline.schedule_paths import KINDS, SchedulePath, schedule_paths
from autopar.solve.space.pipeline_grid import ScheduleOption

_MOST_WALKED = 5_000
"""Actions of the schedules whose clock is looked at."""

_NEARLY = 0.97
"""Paths that are not so long as the longest one are not added."""


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """All calls of one block in the model: how many, and what each takes. `place`: 0 where the first chunk has all of them, -1
    where the last one has; None where any may."""

    count: int
    place: int | None
    durations: tuple[DurationLine, ...]
    saved: tuple[SavedLine, ...]
    states: tuple[CallState, ...]


@dataclass(frozen=True, slots=True)
class StageLimits:
    """`usable_bytes` of one stage; `held`: what the allocator reserves for a byte that is saved."""

    usable_bytes: float
    held: float
    overlap: Overlap


_ROUNDS = 1
"""How often longer paths are looked for."""


def schedule_bound(
    stages: int,
    option: ScheduleOption,
    micro_batches: int,
    calls: Sequence[BlockCalls],
    limits: StageLimits,
    enough_seconds: float = INFINITY,
) -> float:
    """Seconds below every plan of these calls under a schedule; infinite where none fits. Ends early
    where that is `enough_seconds`."""
    actions = 2 * stages * option.virtual * micro_batches
    program = _Program(stages, option, micro_batches, calls, limits)
    best, found = 0.0, program.solve()
    for _ in range(_ROUNDS + 1):
        if found is None:
            return best
        best = max(best, found[0])
        walked = actions <= _MOST_WALKED and found[1] is not None and program.one_by_one
        if best >= enough_seconds or not walked or not program.add_longest_paths(found[1]):
            break
        found = program.solve()
    return best


class _Program:
    """The linear program. Seconds are in `unit`, bytes in `limits.usable_bytes`. `columns`: ``[kind, class]``, the durations of
    one chunk of each class."""

    def __init__(
        self, stages: int, option: ScheduleOption, micro_batches: int, calls: Sequence[BlockCalls], limits: StageLimits
    ) -> None:
        self.calls, self.limits, self.model = calls, limits, LinearModel()
        self.key = stages, option.virtual, option.schedule, micro_batches
        self.shape = schedule_paths(*self.key)
        self.unit = sum(each.count * each.durations[0].least_seconds for each in calls) * micro_batches / stages or 1.0
        model, sizes = self.model, [len(members) for members in self.shape.classes]
        self.one_by_one = max(sizes) == 1
        self.t = model.variable()
        model.minimise({self.t: 1.0})
        # of all chunks of a class together
        self.columns = numpy.array([[model.variable() for _ in sizes] for _ in range(KINDS)])
        self.after = [model.variable() for _ in range(stages)]
        self.parts = [_ClassParts({}, {}, {}) for _ in sizes]
        self._deal(len(sizes))
        for number, size in enumerate(sizes):
            self._bound_class(number, size)
        for stage in range(stages):
            self._bound_stage(stage)
        self._seen: set[tuple[bytes, int]] = set()
        for path in self.shape.paths:
            self._add(path)

    def _deal(self, classes: int) -> None:
        """Calls of each block in each class; how many have their state sharded in each way; what they save and recompute."""
        model = self.model
        for block, each in enumerate(self.calls):
            places = range(classes) if each.place is None else [0 if each.place == 0 else classes - 1]
            dealt = {}
            for place in places:
                parts = self.parts[place]
                count = model.variable(float(each.count))
                dealt[count] = 1.0
                sharded = tuple(model.variable() for _ in each.states)
                # calls = sum of those under each ZeRO stage
                model.row([(count, -1.0), *((column, 1.0) for column in sharded)], 0.0, 0.0)
                again, saved = model.variable(), model.variable()
                parts.counts[block], parts.sharded[block], parts.saved[block] = count, sharded, (again, saved)
                for line in each.saved:
                    terms = {again: line.recompute * self.unit, saved: line.saved * self.limits.usable_bytes, count: -line.least}
                    model.row(terms, 0.0, INFINITY)
            # sum over classes = calls of the model
            model.row(dealt, float(each.count), float(each.count))

    def _bound_class(self, number: int, size: int) -> None:
        """The durations of its chunks, each of which has a call."""
        model, parts = self.model, self.parts[number]
        forward, inputs, weights, first, last = self.columns[:, number].tolist()
        model.row({count: 1.0 for count in parts.counts.values()}, float(size), INFINITY)
        for line, direction in enumerate(self.calls[0].durations):
            sent, left = self._sent(number, direction)
            slowed = {column: self.limits.overlap.contention * seconds for column, seconds in sent.items()}
            rows = [(self._calls_terms(number, line), 0.0)]
            if any(sent.values()):
                rows.append((self._calls_terms(number, line, slowed), self.limits.overlap.contention * left * size))
                rows.append(({column: -seconds for column, seconds in sent.items()}, left * size))
            pairs = ((forward, weights), (first, last), (forward, last), (first, weights))
            three = ({one: direction.forward, inputs: direction.inputs, other: direction.weights} for one, other in pairs)
            for weighted in dict.fromkeys(tuple((column, w) for column, w in each.items() if w) for each in three):
                for terms, most in rows:
                    model.row({**dict(weighted), **terms}, -most, INFINITY)
        self._bound_with_state(number, size)

    def _sent(self, number: int, direction: DurationLine) -> tuple[dict[int, float], float]:
        """Seconds of gathers and reductions in each forward and backward, by column of the sharded calls; and of them at most
        those of a chunk's first call, whose reduction runs after its backward."""
        overlap, out = self.limits.overlap, dict[int, float]()
        for block, columns in self.parts[number].sharded.items():
            for column, one in zip(columns, self.calls[block].states, strict=True):
                backward = one.gather_backward
                if overlap.gradient_reduction and not overlap.gradient_buffers:
                    backward += one.reduce_each
                out[column] = (direction.forward * one.gather_each + direction.inputs * backward) / self.unit
        longest = max((one.reduce_each for each in self.calls for one in each.states), default=0.0)
        return out, direction.inputs * longest / self.unit

    def _calls_terms(self, number: int, line: int, state: Mapping[int, float] | None = None) -> dict[int, float]:
        """What durations by a line have to exceed, with the sign of the left side; `state`: seconds of sharded calls beside
        the accumulation."""
        parts = self.parts[number]
        terms: dict[int, float] = {}
        for block, count in parts.counts.items():
            each = self.calls[block].durations[line]
            terms[count] = -each.least_seconds / self.unit
            terms[parts.saved[block][0]] = -each.inputs
            for column, one in zip(parts.sharded[block], self.calls[block].states, strict=True):
                terms[column] = -(each.inputs * one.accumulate_seconds / self.unit + (state or {}).get(column, 0.0))
        return terms

    def _bound_with_state(self, number: int, size: int) -> None:
        """A forward and a backward with the communication of state: what overlaps compute slows it, and all of it takes its
        time. What the last backward of a chunk leaves to its end is the first call's."""
        model, parts, overlap = self.model, self.parts[number], self.limits.overlap
        forward, inputs, weights, first, last = self.columns[:, number].tolist()
        each_micro_batch: dict[int, float] = {}
        at_last: dict[int, float] = {}
        for block, columns in parts.sharded.items():
            for column, one in zip(columns, self.calls[block].states, strict=True):
                each_micro_batch[column] = (one.gather_each + one.gather_backward + one.reduce_each) / self.unit
                at_last[column] = overlap.contention * one.reduce_last / self.unit
        slowed = {column: overlap.contention * seconds for column, seconds in each_micro_batch.items()}
        model.row({forward: 1.0, inputs: 1.0, weights: 1.0, **self._calls_terms(number, 0, slowed)}, 0.0, INFINITY)
        sent = {column: -seconds for column, seconds in each_micro_batch.items()}
        model.row({forward: 1.0, inputs: 1.0, weights: 1.0, **sent}, 0.0, INFINITY)
        if overlap.gradient_reduction and not overlap.gradient_buffers:
            longest = max((one.reduce_last for each in self.calls for one in each.states), default=0.0)
            left = -size * overlap.contention * longest / self.unit
            terms = self._calls_terms(number, 0, at_last)
            model.row({first: 1.0, inputs: 1.0, last: 1.0, **terms}, left, INFINITY)
            model.row({forward: 1.0, inputs: 1.0, last: 1.0, **terms}, left, INFINITY)

    def _bound_stage(self, stage: int) -> None:
        """What follows its last action: a reduction and the optimizer; and its memory."""
        model, usable = self.model, self.limits.usable_bytes
        mine = [number for number, of in enumerate(self.shape.stage_of_class) if of == stage]
        optimizer: dict[int, float] = {}
        held: dict[int, float] = {}
        for number in mine:
            for block, columns in self.parts[number].sharded.items():
                for column, one in zip(columns, self.calls[block].states, strict=True):
                    optimizer[column] = -one.optimizer_seconds / self.unit
                    held[column] = one.bytes / usable
        heads = [each for each in self.calls if (each.place == 0) == (stage == 0)] or list(self.calls)
        left = min((one.reduce_last for each in heads for one in each.states), default=0.0)
        model.row({self.after[stage]: 1.0, **optimizer}, left / self.unit, INFINITY)
        for in_flight in self.shape.in_flight[stage]:
            saved = {
                column: self.limits.held * in_flight.get(number, 0)
                for number in mine
                for _, column in self.parts[number].saved.values()
            }
            # state + reserved for what is saved <= usable
            model.row({**held, **saved}, -INFINITY, 1.0)

    def _add(self, path: SchedulePath) -> bool:
        key = path.counts.tobytes(), path.end
        if key in self._seen:
            return False
        self._seen.add(key)
        pairs = zip(self.columns.ravel().tolist(), path.counts.ravel().tolist(), strict=True)
        terms = {column: -count for column, count in pairs if count}
        # t >= sum of the path + what follows on its last stage
        self.model.row({self.t: 1.0, self.after[path.end]: -1.0, **terms}, 0.0, INFINITY)
        return True

    def solve(self) -> tuple[float, Any] | None:
        """(seconds, durations of the chunks: None where nothing fits)."""
        outcome = solve(self.model, relaxed=True)
        if outcome.status is Status.INFEASIBLE:
            return INFINITY, None
        if outcome.status is not Status.OPTIMAL:
            return None
        return outcome.bound * self.unit, numpy.array(outcome.values)[self.columns]

    def add_longest_paths(self, durations: Any) -> bool:
        """The longest path to each rank's end, where that is nearly the longest of all; whether there was a new one."""
        forward, inputs, weights, first, last = durations
        slots = [forward, inputs + weights, inputs, weights, first, inputs + last, last]  # the order of `clock._SLOTS`
        table = numpy.stack(slots, axis=1).ravel().tolist()
        clock = _clock(*self.key)
        ranks = len(clock.busy)
        free, latest = [0.0] * ranks, [-1] * ranks
        ends: list[float] = []
        before: list[int] = []
        for place, (rank, slot, after, *_) in enumerate(clock.steps):
            start, waits_for = free[rank], latest[rank]
            if after >= 0 and ends[after] > start:
                start, waits_for = ends[after], after
            ends.append(start + table[slot])
            before.append(waits_for)
            free[rank], latest[rank] = ends[place], place
        longest = max(free)
        ended = [(rank, place) for rank, place in enumerate(latest) if ends[place] >= _NEARLY * longest]
        return any([self._add(self._path(clock, rank, place, before)) for rank, place in ended])

    @staticmethod
    def _path(clock: ScheduleClock, rank: int, place: int, before: Sequence[int]) -> SchedulePath:
        slots = []
        while place >= 0:
            slots.append(clock.steps[place][1])
            place = before[place]
        many = 7
        chunks = max(slot for _, slot, *_ in clock.steps) // many + 1
        n = numpy.bincount(slots, minlength=many * chunks).reshape(chunks, many).T.astype(float)
        return SchedulePath(numpy.stack([n[0], n[1] + n[2] + n[5], n[1] + n[3], n[4], n[5] + n[6]]), rank)


@dataclass(frozen=True, slots=True)
class _ClassParts:
    """By block: the columns of its calls, of those under each ZeRO stage, and of their recomputed seconds and saved bytes."""

    counts: dict[int, int]
    sharded: dict[int, tuple[int, ...]]
    saved: dict[int, tuple[int, int]]


@lru_cache(maxsize=64)
def _clock(stages: int, virtual: int, schedule: str, micro_batches: int) -> ScheduleClock:
    return ScheduleClock.of(schedule_of(Pipeline(stages, virtual, schedule), micro_batches))
