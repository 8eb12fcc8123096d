"""The clock of a schedule whose ranks share processor cores: a rank that waits leaves its share to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from autopar.schedules.clock import ActionSpan, ChunkSeconds, RankSeconds, ScheduleClock


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The clock of cores that are divided evenly among the ranks at work, of which each takes one core at most (generalized
    processor sharing: L. Kleinrock, Queueing Systems 2, 1976, section 4.4). Seconds of chunks are those of all ranks at work,
    `ranks_per_core` to a core; messages, and the part of an action that waits for communication (`waits`, as chunks), take theirs
    whoever works. No shorter than all work on all cores, nor than the clock of ranks with a core each (R. P. Brent, The Parallel
    Evaluation of General Arithmetic Expressions, 1974)."""

    clock: ScheduleClock
    ranks_per_core: float
    waits: Sequence[ChunkSeconds] = ()

    def run(
        self, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float] = (), blocking: bool = False
    ) -> tuple[RankSeconds, ...]:
        """Run the schedule as `ScheduleClock.run` does; a rank is busy while one of its actions has begun and not ended."""
        spans = self.action_spans(chunks, transfer_seconds, blocking)
        busy = (sum(span.end_seconds - span.start_seconds for span in each) for each in spans)
        return tuple(
            RankSeconds(seconds, each[-1].end_seconds if each else 0.0) for seconds, each in zip(busy, spans, strict=True)
        )

    def action_spans(
        self, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float] = (), blocking: bool = False
    ) -> tuple[tuple[ActionSpan, ...], ...]:
        """Return when actions begin and end, as `ScheduleClock.action_spans` does."""
        table = [seconds for chunk in chunks for seconds in chunk.slots]
        waits = [seconds for chunk in self.waits for seconds in chunk.slots] or [0.0] * len(table)
        walk = _Walk(self.clock, transfer_seconds or (0.0,) * (len(chunks) - 1), blocking)
        while walk.unfinished:
            arrivals = walk.begin(table, waits)
            speed = min(self.ranks_per_core, len(self.clock.busy) / max(1, len(walk.left)))
            walk.proceed(min((walk.now + seconds / speed for seconds in walk.left.values()), default=inf), arrivals, speed)
        out: list[list[ActionSpan]] = [[] for _ in self.clock.busy]
        for (rank, *_), cell, start, end in zip(self.clock.steps, self.clock.cells, walk.starts, walk.ends, strict=True):
            out[rank].append(ActionSpan(self.clock.schedule.ranks[rank][cell], start, end))
        return tuple(map(tuple, out))


class _Walk:
    """The state of the clock: each rank's next action (`head`), the seconds that are left of those that have begun, then what
    they wait, and until when; and what has ended and arrived."""

    def __init__(self, clock: ScheduleClock, lags: Sequence[float], blocking: bool) -> None:
        self.steps, self.lags, self.blocking = clock.steps, lags, blocking
        many, self.now = len(clock.busy), 0.0
        queues: list[list[int]] = [[] for _ in range(many)]
        for index, (rank, *_) in enumerate(self.steps):
            queues[rank].append(index)
        self.upcoming = [iter(queue) for queue in queues]
        self.head = [next(each, None) for each in self.upcoming]
        self.starts, self.ends, self.arrivals = ([inf] * len(self.steps) for _ in range(3))
        self.free, self.channels = [0.0] * many, [0.0] * many**2
        self.left: dict[int, float] = {}
        self.wait: dict[int, float] = {}
        self.until: dict[int, float] = {}

    @property
    def unfinished(self) -> bool:
        return any(index is not None for index in self.head)

    def begin(self, table: Sequence[float], waits: Sequence[float]) -> list[float]:
        """Begin every action that can, and return when what others wait for arrives."""
        for rank in [rank for rank, until in self.until.items() if until <= self.now]:
            del self.until[rank]
            self._end(rank, self.now)
        arriving = list(self.until.values())
        for rank, index in enumerate(self.head):
            if index is None or rank in self.left or rank in self.until:
                continue
            _, slot, after, cut, _, _ = self.steps[index]
            ready = max(self.free[rank], 0.0 if after < 0 else self.ends[after] if cut < 0 else self.arrivals[after])
            if ready <= self.now:
                self.wait[rank] = min(waits[slot], table[slot])
                self.left[rank], self.starts[index] = table[slot] - self.wait[rank], self.now
            elif ready < inf:
                arriving.append(ready)
        return arriving

    def proceed(self, done: float, arriving: Sequence[float], speed: float) -> None:
        """Go on to the end of the first action (`done`) or the first arrival."""
        then = min(done, *arriving) if arriving else done
        for rank, seconds in tuple(self.left.items()):
            if self.now + seconds / speed > then:
                self.left[rank] = seconds - (then - self.now) * speed
            else:
                del self.left[rank]
                if self.wait[rank]:
                    self.until[rank] = then + self.wait[rank]
                else:
                    self._end(rank, then)
        self.now = then

    def _end(self, rank: int, now: float) -> None:
        index = self.head[rank]
        assert index is not None
        *_, sends, channel = self.steps[index]
        self.ends[index] = self.arrivals[index] = now
        if sends >= 0:
            self.channels[channel] = self.arrivals[index] = max(now, self.channels[channel]) + self.lags[sends]
        self.free[rank] = self.arrivals[index] if self.blocking else now
        self.head[rank] = next(self.upcoming[rank], None)
