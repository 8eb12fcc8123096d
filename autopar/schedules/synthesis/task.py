"""The scheduling problem: chunks on ranks with their times, and the memory limit of each rank; and a lower bound of the makespan
of every schedule of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.clock import ChunkSeconds

FORWARDS, BACKWARDS, WEIGHTS = 0, 1, 2
"""Kinds by number. Backwards are whole, or those of the inputs where the backward is in two parts."""

Order = tuple[tuple[tuple[int, int, int], ...], ...]
"""The (chunk, kind, micro-batch) of each action, by rank."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The memory limits of a task. `saved_bytes[c]`: what one micro-batch saves in chunk c from F to B or I; `deferred_bytes[c]`:
    what of it stays from I to W (all of it where that is empty). `limit_bytes[r]`: what fits on rank r."""

    saved_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    deferred_bytes: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """The scheduling problem. Micro-batches are alike, so that each kind runs in their order on each chunk: the k-th smallest of
    times that are all behind others is behind the k-th smallest of these, and no schedule is lost.

    `seconds[c][kind]` is the usual one, `first[c]` that of the first forward, `last[c]` that of the last backward or weights. A
    send that blocks is a part of its action; otherwise `lags[c]` lie between chunks c and c + 1.
    """

    rank_of: tuple[int, ...]
    micro_batches: int
    split: bool
    seconds: tuple[tuple[float, float, float], ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    lags: tuple[float, ...]
    saved: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]

    @classmethod
    def of(
        cls,
        chunks: Sequence[ChunkSeconds],
        rank_of: Sequence[int],
        micro_batches: int,
        transfer_seconds: Sequence[float] = (),
        blocking: bool = False,
        memory: MemoryLimits | None = None,
        split: bool = False,
    ) -> Task:
        many, ranks = len(chunks), max(rank_of) + 1
        sent = [0.0] * many
        for cut, lag in enumerate(transfer_seconds):
            sent[cut] = lag if rank_of[cut] != rank_of[cut + 1] else 0.0
        seconds, first, last = [], [], []
        for chunk, each in enumerate(chunks):
            forth, back = (sent[chunk], sent[chunk - 1] if chunk else 0.0) if blocking else (0.0, 0.0)
            forward, backward, inputs, weights, first_forward, last_backward, last_weights = each.slots
            seconds.append((forward + forth, (inputs if split else backward) + back, weights if split else 0.0))
            first.append(first_forward + forth)
            last.append(last_weights if split else last_backward + back)
        saved = memory.saved_bytes if memory else (0.0,) * many
        return cls(
            tuple(rank_of),
            micro_batches,
            split,
            tuple(seconds),
            tuple(first),
            tuple(last),
            (0.0,) * (many - 1) if blocking else tuple(sent[: many - 1]),
            saved,
            (memory.deferred_bytes or saved) if memory else saved,
            memory.limit_bytes if memory else (0.0,) * ranks,
        )

    @property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def last_kind(self) -> int:
        return WEIGHTS if self.split else BACKWARDS

    @property
    def kinds(self) -> tuple[int, ...]:
        return (FORWARDS, BACKWARDS, WEIGHTS) if self.split else (FORWARDS, BACKWARDS)

    def dependency(self, chunk: int, kind: int) -> tuple[int, int, float] | None:
        """Return (chunk, kind, seconds between) of the same micro-batch that an action waits for."""
        if kind == WEIGHTS:
            return chunk, BACKWARDS, 0.0
        if kind == FORWARDS:
            return (chunk - 1, FORWARDS, self.lags[chunk - 1]) if chunk else None
        return (chunk + 1, BACKWARDS, self.lags[chunk]) if chunk + 1 < len(self.rank_of) else (chunk, FORWARDS, 0.0)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        return tuple(chunk for chunk, where in enumerate(self.rank_of) if where == rank)

    def duration(self, chunk: int, kind: int, micro_batch: int) -> float:
        if kind == FORWARDS and micro_batch == 0:
            return self.first[chunk]
        if kind == self.last_kind and micro_batch == self.micro_batches - 1:
            return self.last[chunk]
        return self.seconds[chunk][kind]

    def busy_seconds(self, rank: int) -> float:
        """Return the seconds of all actions of a rank."""
        total = 0.0
        for chunk in self.chunks_of(rank):
            usual = self.seconds[chunk]
            total += self.micro_batches * sum(usual)
            total += self.first[chunk] - usual[FORWARDS] + self.last[chunk] - usual[self.last_kind]
        return total

    def before_forward(self, chunk: int, micro_batch: int) -> list[tuple[int, int]]:
        """Return (kind, micro-batch) of the chunk that have ended before this forward can begin, under the memory limit: no more
        are in flight whole than fit, nor have more of them their weights to come than fit beside this one."""
        saved, deferred, limit = self.saved[chunk], self.deferred[chunk], self.limit[self.rank_of[chunk]] * (1 + 1e-9)
        out = []
        if saved:
            out.append((BACKWARDS, micro_batch - floor(limit / saved)))
        if min(saved, deferred) and self.split:
            out.append((WEIGHTS, micro_batch - 1 - floor((limit - saved) / min(saved, deferred))))
        return [(kind, before) for kind, before in out if before >= 0]

    def fits(self, actions: Sequence[Action], rank: int) -> bool:
        """Return whether what the rank holds stays within its limit."""
        now, limit = 0.0, self.limit[rank] * (1 + 1e-9)
        for action in actions:
            saved, deferred = self.saved[action.chunk], self.deferred[action.chunk]
            now += {FORWARD: saved, BACKWARD: -saved, INPUT: deferred - saved, WEIGHT: -deferred}[action.kind]
            if now > limit:
                return False
        return True

    def schedule(self, name: str, orders: Order) -> Schedule:
        """Return the schedule of these orders with whole backwards, or all of them in two parts."""
        letters = (FORWARD, INPUT if self.split else BACKWARD, WEIGHT)
        return Schedule(
            name, tuple(tuple(Action(chunk, letters[kind], micro) for chunk, kind, micro in order) for order in orders)
        )


def makespan_lower_bound(task: Task) -> float:
    """Return the way of one micro-batch there and back, or the largest over ranks of these:

    With h when the first input is there, w the rank's work, t the way from the end of its last action to the end of the step:
    ``h + w + t``. Where memory binds: before the first backward can begin at b, a rank does no more forwards than fit in
    memory, f; ``b + w - f + t``. When its last forward begins no more backwards are left than those of what it holds then, g;
    with z the way from the end of that forward to the last chunk and back, to the end of the step: ``h + w - g + z``. And,
    unless memory suffices for all, both: ``b + w - f - g + z``.
    """
    last, many = len(task.rank_of) - 1, task.micro_batches
    ways = [
        task.duration(0, FORWARDS, micro) + _forward_path(task, 0, last, micro) + _backward_path(task, last, micro)
        for micro in (0, many - 1)
    ]
    return max(*ways, _dependency_bound(task), *(_rank_bound(task, rank) for rank in range(task.ranks)))


def _dependency_bound(task: Task) -> float:
    """Return when the last action ends if ranks do any number of actions at once: what is left is the order of each kind on a
    chunk, what actions wait for, and backwards for which forwards wait since memory does not suffice for all."""
    last, many = len(task.rank_of) - 1, task.micro_batches
    ends: dict[tuple[int, int, int], float] = {}
    for micro in range(many):
        for kind in task.kinds:
            for chunk in range(last + 1) if kind == FORWARDS else range(last, -1, -1):
                start = ends.get((chunk, kind, micro - 1), 0.0)
                if kind == FORWARDS:
                    start = max([start, *(ends[chunk, *other] for other in task.before_forward(chunk, micro))])
                    start = max(start, ends[chunk - 1, kind, micro] + task.lags[chunk - 1] if chunk else 0.0)
                elif kind == BACKWARDS and chunk < last:
                    start = max(start, ends[chunk + 1, kind, micro] + task.lags[chunk])
                else:
                    start = max(start, ends[chunk, kind - 1, micro])
                ends[chunk, kind, micro] = start + task.duration(chunk, kind, micro)
    return max(ends.values())


def _forward_path(task: Task, chunk: int, to: int, micro: int) -> float:
    """Return the seconds from the end of a forward of `chunk` to the end of that of `to`."""
    return sum(task.lags[at] + task.duration(at + 1, FORWARDS, micro) for at in range(chunk, to))


def _backward_path(task: Task, chunk: int, micro: int) -> float:
    """Return the seconds from the begin of a backward of `chunk` until its micro-batch has all of its backwards from there on."""
    most = passed = 0.0
    for at in range(chunk, -1, -1):
        passed += task.duration(at, BACKWARDS, micro)
        most = max(most, passed + (task.duration(at, WEIGHTS, micro) if task.split else 0.0))
        passed += task.lags[at - 1] if at else 0.0
    return most


def _rank_bound(task: Task, rank: int) -> float:
    chunks, last, many = task.chunks_of(rank), len(task.rank_of) - 1, task.micro_batches
    low, high, work = chunks[0], chunks[-1], task.busy_seconds(rank)
    input_at = task.duration(0, FORWARDS, 0) + _forward_path(task, 0, low, 0) - task.duration(low, FORWARDS, 0)
    backward_at = task.duration(0, FORWARDS, 0) + _forward_path(task, 0, last, 0)
    backward_at += sum(task.duration(at, BACKWARDS, 0) + task.lags[at - 1] for at in range(last, high, -1))
    # Parts of weights may fill the rank to the end; whole backwards leave the way to the first chunk.
    tail = 0.0 if task.split else _backward_path(task, low, many - 1) - task.duration(low, BACKWARDS, many - 1)
    way = _forward_path(task, high, last, many - 1) + _backward_path(task, last, many - 1)
    limit = task.limit[rank] if any(task.saved[chunk] for chunk in chunks) else inf
    ahead = sum(max(0.0, task.first[chunk] - task.seconds[chunk][FORWARDS]) for chunk in chunks)
    ahead += _most_in_memory([(task.seconds[chunk][FORWARDS], task.saved[chunk], many) for chunk in chunks], limit)
    left = sum(max(0.0, task.last[chunk] - task.seconds[chunk][task.last_kind]) for chunk in chunks)
    left = min(work, left + _held_backwards(task, chunks, limit))
    out = max(input_at + work + tail, backward_at + work - ahead + tail, input_at + work - left + way)
    if limit < many * sum(task.saved[chunk] for chunk in chunks):
        out = max(out, backward_at + work - ahead - left + way)
    return out


def _held_backwards(task: Task, chunks: Sequence[int], limit: float) -> float:
    """Return the most seconds of backwards that are left of what is held: of a micro-batch all of them, or only its weights."""
    best = 0.0
    for chunk in chunks:
        _, inputs, weights = task.seconds[chunk]
        for seconds, size in ((inputs + weights, task.saved[chunk]), (weights, task.deferred[chunk])):
            best = max(best, (seconds / size if size else inf) if seconds else 0.0)
    return best * limit if best else 0.0


def _most_in_memory(items: Sequence[tuple[float, float, int]], limit: float) -> float:
    """Return the most seconds of (seconds, bytes, how many at most) in `limit` bytes, parts of one counted."""
    total = 0.0
    for seconds, size, many in sorted(items, key=lambda item: -(item[0] / item[1] if item[1] else inf)):
        count = min(float(many), limit / size) if size else float(many)
        total += count * seconds
        limit -= count * size
    return total
