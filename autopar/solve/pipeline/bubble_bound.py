"""A lower bound of a schedule's makespan over all ways to partition the model, by cutting planes.

The order of a schedule's actions is fixed, so its makespan is the longest of many paths, each a sum of the chunks' forwards and
backwards: a convex function of their durations. The linear program chooses the durations that make the longest of the known paths
shortest; the schedule's clock shows longer paths there, which are added, a few times. Every path bounds every partition, so the
program's value is a bound from the start. (Kelley, The cutting-plane method for solving convex programs, 1960.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.solve.ilp.linear_model import INFINITY, LinearModel
from autopar.solve.ilp.solver import Status, solve
from autopar.solve.space.pipeline_grid import ScheduleOption

_ROUNDS = 12

_MOST_PROGRAMS = 16
"""In one search; a program takes about 0.04 s."""

_MOST_ACTIONS = 2_500
"""Of the schedules that are looked at."""


@dataclass(frozen=True, slots=True)
class WorkShare:
    """The calls of one block, as shares of what all calls take for one micro-batch: `both` in all; `forward`, `inputs` and
    `backward` at least of forwards, of gradients of inputs, and of these with the gradients of weights. `place`: 0 where the
    first chunk has all of them, -1 where the last one has; None where any may. `least`: one of them."""

    both: float
    forward: float
    inputs: float
    backward: float
    place: int | None
    least: float


@lru_cache(maxsize=64)
def _clock(stages: int, virtual: int, schedule: str, micro_batches: int) -> ScheduleClock:
    return ScheduleClock.of(schedule_of(Pipeline(stages, virtual, schedule), micro_batches))


class BubbleFactors:
    """Of one search: points that differ in the sharding of state alone have one program."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[float, float]] = {}
        self._left = _MOST_PROGRAMS

    def factor(
        self, stages: int, option: ScheduleOption, micro_batches: int, shares: tuple[WorkShare, ...], enough: float = INFINITY
    ) -> float:
        """As `bubble_factor`; 1 once there were many programs."""
        key = stages, option, micro_batches, shares
        found, wanted = self._known.get(key, (1.0, 0.0))
        if wanted < enough and found < enough and self._left:
            self._left -= 1
            found = bubble_factor(stages, option, micro_batches, shares, enough)
            self._known[key] = found, enough
        return found


def bubble_factor(
    stages: int, option: ScheduleOption, micro_batches: int, shares: Sequence[WorkShare], enough: float = INFINITY
) -> float:
    """The makespan over what the stages compute on average, at least 1. Ends early where that is `enough`; 1 for schedules of
    many actions."""
    if 2 * stages * option.virtual * micro_batches > _MOST_ACTIONS:
        return 1.0
    program = _Durations(_clock(stages, option.virtual, option.schedule, micro_batches), stages * option.virtual, shares)
    average = micro_batches / stages
    best, centre = 0.0, program.even()
    at = centre
    for turn in range(_ROUNDS):
        program.add_longest_paths(at, best)
        found = program.solve()
        if found is None:
            break
        best, durations = max(best, found[0]), found[1]
        if best >= enough * average:
            break
        centre = (centre + durations) / 2
        at = durations if turn % 2 else centre
    return max(1.0, best / average)


class _Durations:
    """The linear program. Rows of durations are forwards, gradients of inputs, gradients of weights; columns are chunks."""

    def __init__(self, clock: ScheduleClock, chunks: int, shares: Sequence[WorkShare]) -> None:
        self.clock, self.chunks, self.shares, self.model = clock, chunks, shares, LinearModel()
        model = self.model
        self.t = model.variable()
        model.minimise({self.t: 1.0})
        self.columns = numpy.array([[model.variable() for _ in range(chunks)] for _ in range(3)])
        work: list[dict[int, WorkShare]] = [{} for _ in range(chunks)]
        for share in shares:
            placed = range(chunks) if share.place is None else [share.place]
            parts = {chunk: model.variable(share.both) for chunk in placed}
            model.row([(part, 1.0) for part in parts.values()], share.both, share.both)
            for chunk, part in parts.items():
                work[chunk][part] = share
        least = min((each.least for each in shares), default=0.0)
        for chunk, mine in enumerate(work):
            forward, inputs, weights = self.columns[:, chunk].tolist()
            self._bound_chunk(forward, inputs, weights, mine)
            model.row([(part, 1.0) for part in mine], least, INFINITY)
        self._seen: set[bytes] = set()
        for busy in clock.busy:
            self._add_path([slot for slot, count in busy for _ in range(count)])

    def _bound_chunk(self, forward: int, inputs: int, weights: int, parts: dict[int, WorkShare]) -> None:
        """Each kind of its durations, and all of them, by what the chunk has of each block."""
        for columns, kind in (
            ((forward,), "forward"),
            ((inputs,), "inputs"),
            ((inputs, weights), "backward"),
            ((forward, inputs, weights), "both"),
        ):
            rates = [(part, -getattr(share, kind) / share.both if share.both else 0.0) for part, share in parts.items()]
            self.model.row([*((column, 1.0) for column in columns), *rates], 0.0, INFINITY)

    def even(self) -> Any:
        """The durations of equal chunks."""
        forward, inputs, both = (sum(getattr(each, kind) for each in self.shares) for kind in ("forward", "inputs", "both"))
        return (
            numpy.array([[forward] * self.chunks, [inputs] * self.chunks, [both - forward - inputs] * self.chunks]) / self.chunks
        )

    def solve(self) -> tuple[float, Any] | None:
        """(least makespan by the known paths, durations)."""
        outcome = solve(self.model, relaxed=True)
        if outcome.status is not Status.OPTIMAL:
            return None
        return outcome.objective, numpy.array(outcome.values)[self.columns]

    def add_longest_paths(self, durations: Any, longer_than: float) -> None:
        """The longest path to each rank's end, where that is nearly as long as is known of all."""
        forward, inputs, weights = durations
        backward = inputs + weights
        # the order of `clock._SLOTS`
        table = numpy.stack([forward, backward, inputs, weights, forward, backward, weights], axis=1).ravel().tolist()
        ranks = len(self.clock.busy)
        free, last = [0.0] * ranks, [-1] * ranks
        ends: list[float] = []
        before: list[int] = []
        for place, (rank, slot, after, *_) in enumerate(self.clock.steps):
            start, waits_for = free[rank], last[rank]
            if after >= 0 and ends[after] > start:
                start, waits_for = ends[after], after
            ends.append(start + table[slot])
            before.append(waits_for)
            free[rank], last[rank] = ends[place], place
        for place in last:
            if ends[place] < 0.98 * longer_than:
                continue
            path = []
            while place >= 0:
                path.append(self.clock.steps[place][1])
                place = before[place]
            self._add_path(path)

    def _add_path(self, slots: Sequence[int]) -> None:
        counts = numpy.bincount(slots, minlength=7 * self.chunks).reshape(self.chunks, 7)
        forward, backward = counts[:, 0] + counts[:, 4], counts[:, 1] + counts[:, 5]
        terms = numpy.stack([forward, backward + counts[:, 2], backward + counts[:, 3] + counts[:, 6]])
        if terms.tobytes() in self._seen:
            return
        self._seen.add(terms.tobytes())
        # t >= sum of the path
        pairs = zip(self.columns.ravel().tolist(), terms.ravel().tolist(), strict=True)
        self.model.row([(self.t, 1.0), *((column, -float(count)) for column, count in pairs if count)], 0.0, INFINITY)
