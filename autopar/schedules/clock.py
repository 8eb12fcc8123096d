"""The simulated clock of a schedule: an action begins when its rank is free and what it waits for has arrived; and a schedule on
its clock, as lines of text."""

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


LEGEND = (
    "F forward, B backward, I gradient of the inputs, W of the weights, then the micro-batch; small letters: every second chunk"
)
_LEAST = 2
"""Columns of a usual action: its letter and a digit."""

_LEFT_OUT = " ~ "
_FILL = {"F": "-", "B": "=", "I": "+", "W": "."}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A line for each rank. `left_out`: the seconds (from, to) in the middle that did not fit, which are at `_LEFT_OUT`."""

    lines: tuple[str, ...]
    left_out: tuple[float, float] | None


def draw(ranks: Sequence[Sequence[ActionSpan]], width: int) -> Drawing:
    """Draw ranks in `width` columns at most, without the ranks' names. Where actions are too narrow, the middle is left out."""
    spans = [span for rank in ranks for span in rank]
    end = max((span.end_seconds for span in spans), default=0.0)
    if not end:
        return Drawing(("",) * len(ranks), None)
    lengths = sorted(span.end_seconds - span.start_seconds for span in spans)
    usual = next((each for each in lengths[len(lengths) // 10 :] if each > 0), end)
    columns_per_second = max(width / end, _LEAST / usual)
    whole = int(end * columns_per_second + 0.5)
    chunks = [sorted({span.action.chunk for span in rank}) for rank in ranks]
    lines = [_line(rank, columns_per_second, whole, chunks_here) for rank, chunks_here in zip(ranks, chunks, strict=True)]
    if whole <= width:
        return Drawing(tuple(lines), None)
    shown = width - len(_LEFT_OUT)
    first = max(0, shown - shown // 2)
    last = whole - max(0, shown // 2)
    out = tuple(line[:first] + _LEFT_OUT + line[last:] for line in lines)
    return Drawing(out, (first / columns_per_second, last / columns_per_second))


def _line(rank: Sequence[ActionSpan], columns_per_second: float, whole: int, chunks: Sequence[int]) -> str:
    line = [" "] * whole
    for span in rank:
        first, last = (int(at * columns_per_second + 0.5) for at in (span.start_seconds, span.end_seconds))
        action = span.action
        letter = action.kind.lower() if chunks.index(action.chunk) % 2 else action.kind
        columns, number = last - first, str(action.micro_batch)
        digits = number if len(number) < columns else number[-1:]
        line[first:last] = (letter + digits).ljust(columns, _FILL[action.kind])[:columns]
    return "".join(line)
