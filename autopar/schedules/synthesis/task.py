"""The scheduling problem: chunks on ranks with their times, and the memory limit of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

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
