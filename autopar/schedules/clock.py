"""The simulated clock of a schedule: an action begins when its rank is free and what it waits for has arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.check import check, topological_order

_SLOTS = (FORWARD, BACKWARD, INPUT, WEIGHT, "first forward", "last backward", "last weights")


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """The seconds of one micro-batch through a chunk. The first forward and the last backward of a step differ (weights are
    gathered, gradients reduced). A backward in two parts takes `input_backward` and `weight_backward`, or half of `backward`
    each; what the last backward takes more is then in its weights' part."""

    forward: float
    backward: float
    first_forward: float | None = None
    last_backward: float | None = None
    input_backward: float | None = None
    weight_backward: float | None = None

    @property
    def parts(self) -> tuple[float, float]:
        """The parts of a backward, (I, W)."""
        if self.input_backward is not None and self.weight_backward is not None:
            return self.input_backward, self.weight_backward
        if self.weight_backward is not None:
            return max(0.0, self.backward - self.weight_backward), self.weight_backward
        first = self.backward / 2 if self.input_backward is None else self.input_backward
        return first, max(0.0, self.backward - first)

    @property
    def slots(self) -> tuple[float, ...]:
        """The durations in the order of ``_SLOTS``."""
        inputs, weights = self.parts
        first = self.forward if self.first_forward is None else self.first_forward
        last = self.backward if self.last_backward is None else self.last_backward
        return self.forward, self.backward, inputs, weights, first, last, max(0.0, weights + last - self.backward)


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """The seconds of one rank on the clock. `busy_seconds` runs actions (and sends, where that blocks), `end_seconds` is when the
    last one ends; the rest of it is the bubble."""

    busy_seconds: float
    end_seconds: float

    @property
    def bubble_seconds(self) -> float:
        return self.end_seconds - self.busy_seconds


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action on the clock."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class ScheduleClock:
    """A schedule that is ready to run with any times. Per action, in an order in which none waits for a later one: its rank and
    cell, its slot in the table of seconds, what it waits for, over which cut, the cut over which its result is sent, and the
    channel (of one rank to another one)."""

    schedule: Schedule
    steps: tuple[tuple[int, int, int, int, int, int], ...]
    cells: tuple[int, ...]
    busy: tuple[tuple[tuple[int, int], ...], ...]
    """The (slot, how often) of each rank."""
    sent: tuple[tuple[tuple[int, int], ...], ...]
    """The (cut, how often) of each rank."""

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleClock:
        """Order the actions of a schedule. PlanError where it has a deadlock."""
        compute = schedule.compute
        order = topological_order(compute)
        if order.stuck:
            check(compute)
            raise PlanError(f"schedule {schedule.name} has a deadlock")
        many, slots = len(compute.ranks), _slots(compute)
        cuts, channels = [-1] * len(order.rank), [0] * len(order.rank)
        sent: list[Counter[int]] = [Counter() for _ in compute.ranks]
        for rank, after, cut in zip(order.rank, order.after, order.cut, strict=True):
            if cut >= 0:
                cuts[after], channels[after] = cut, order.rank[after] * many + rank
                sent[order.rank[after]][cut] += 1
        table = [slots[rank][cell] for rank, cell in zip(order.rank, order.cell, strict=True)]
        steps = tuple(zip(order.rank, table, order.after, order.cut, cuts, channels, strict=True))
        busy = tuple(tuple(Counter(each).items()) for each in slots)
        return cls(compute, steps, order.cell, busy, tuple(tuple(each.items()) for each in sent))

    def run(
        self, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float] = (), blocking: bool = False
    ) -> tuple[RankSeconds, ...]:
        """Run the schedule. `transfer_seconds[c]` is one transfer between chunks c and c + 1, the same both ways, where they are
        on different ranks; what one rank sends to another one goes one after the other. With `blocking` the sender does nothing
        else meanwhile. The makespan is the largest end."""
        free, _ = self._walk(chunks, transfer_seconds, blocking)
        table = [seconds for chunk in chunks for seconds in chunk.slots]
        busy = [sum(table[slot] * count for slot, count in each) for each in self.busy]
        if blocking and transfer_seconds:
            busy = [
                seconds + sum(transfer_seconds[cut] * count for cut, count in each)
                for seconds, each in zip(busy, self.sent, strict=True)
            ]
        return tuple(RankSeconds(spent, end) for spent, end in zip(busy, free, strict=True))

    def action_spans(
        self, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float] = (), blocking: bool = False
    ) -> tuple[tuple[ActionSpan, ...], ...]:
        """Return when each action of each rank begins and ends, as `run` has it. A send that blocks follows its action's end."""
        _, ends = self._walk(chunks, transfer_seconds, blocking)
        table = [seconds for chunk in chunks for seconds in chunk.slots]
        out: list[list[ActionSpan]] = [[] for _ in self.schedule.ranks]
        for (rank, slot, *_), cell, end in zip(self.steps, self.cells, ends, strict=True):
            out[rank].append(ActionSpan(self.schedule.ranks[rank][cell], end - table[slot], end))
        return tuple(map(tuple, out))

    def _walk(
        self, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float], blocking: bool
    ) -> tuple[list[float], list[float]]:
        """Return when each rank is free at last, and each action ends."""
        table = [seconds for chunk in chunks for seconds in chunk.slots]
        lags = transfer_seconds or (0.0,) * (len(chunks) - 1)
        free, channels = [0.0] * len(self.busy), [0.0] * len(self.busy) ** 2
        ends: list[float] = []
        arrivals: list[float] = []
        for rank, slot, after, cut, sends, channel in self.steps:
            start = free[rank]
            if after >= 0:
                there = ends[after] if cut < 0 else arrivals[after]
                if there > start:
                    start = there
            end = arrival = start + table[slot]
            if sends >= 0:
                arrival = max(end, channels[channel]) + lags[sends]
                channels[channel] = arrival
            ends.append(end)
            arrivals.append(arrival)
            free[rank] = arrival if blocking else end
        return free, ends


def _slots(schedule: Schedule) -> list[list[int]]:
    """Return per rank and cell the place in the table of all chunks' seconds."""
    number, many = {kind: place for place, kind in enumerate(_SLOTS)}, len(_SLOTS)
    out = []
    for actions in schedule.ranks:
        slots = [each.chunk * many + number[each.kind] for each in actions]
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for cell, each in enumerate(actions):
            if each.kind == FORWARD:
                first.setdefault(each.chunk, cell)
            elif each.kind != INPUT:
                last[each.chunk] = cell
        for chunk, cell in first.items():
            slots[cell] = chunk * many + number["first forward"]
        for chunk, cell in last.items():
            slots[cell] = chunk * many + number["last backward" if actions[cell].kind == BACKWARD else "last weights"]
        out.append(slots)
    return out
