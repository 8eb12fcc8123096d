"""The main stream of one device (compute and exposed communication) and its communication stream, which overlaps with it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTE, EXPOSED, STALL, TRANSFER = "compute", "exposed communication", "stall", "transfer"


class StreamSpan(NamedTuple):
    """What a stream does from `start_seconds` to `end_seconds`: COMPUTE, EXPOSED (over `links`) or STALL on the main stream,
    TRANSFER on the communication stream; `what` names a transfer, `call` is the call that it is of (-1: of none)."""

    kind: str
    start_seconds: float
    end_seconds: float
    call: int
    what: str = ""
    links: frozenset[str] = frozenset()


@dataclass(slots=True)
class StreamRecord:
    """What both streams do, in spans; `call` is whose segments the main stream runs. A span of a transfer includes the time in
    which the main stream has its links. Only what draws a step records one."""

    spans: list[StreamSpan] = field(default_factory=list)
    call: int = -1
    _transfers: dict[int, tuple[str, int]] = field(default_factory=dict)
    _began: dict[int, float] = field(default_factory=dict)

    def main(self, kind: str, begin: float, end: float, links: frozenset[str] = frozenset()) -> None:
        if end > begin:
            self.spans.append(StreamSpan(kind, begin, end, self.call, links=links))

    def issued(self, ticket: int, what: str, call: int) -> None:
        self._transfers[ticket] = what, call

    def proceeds(self, ticket: int, begin: float) -> None:
        self._began.setdefault(ticket, begin)

    def ended(self, ticket: int, end: float) -> None:
        begin = self._began.pop(ticket, end)
        what, call = self._transfers.get(ticket, ("background transfers", -1))
        if end > begin:
            self.spans.append(StreamSpan(TRANSFER, begin, end, call, what))

    def pass_ends(self, end: float) -> tuple[StreamSpan, ...]:
        """Return the spans since the last call; a transfer that goes on is cut here."""
        for ticket in tuple(self._began):
            self.ended(ticket, end)
            self._began[ticket] = end
        spans, self.spans, self.call = tuple(self.spans), [], -1
        return spans


_BACKGROUND = 0
"""The ticket of all background transfers in a record."""


@dataclass(slots=True)
class Streams:
    """A clock of the main stream, and a queue of transfers on the data axis, which run one after the other.

    A transfer progresses while time passes, except while the main stream uses one of its physical links (the main stream has
    priority there). While a transfer runs, compute loses `contention` of its speed.

    links: physical links of the data axis.
    stall_seconds: time that the main stream waited for transfers, or lost to contention.
    """

    links: frozenset[str]
    contention: float = 0.0
    clock_seconds: float = 0.0
    stall_seconds: float = 0.0
    record: StreamRecord | None = None
    _background_seconds: float = 0.0
    _queue: deque[tuple[int, float]] = field(default_factory=deque)
    _issued: int = 0
    _done: int = 0

    def issue(self, seconds: float, what: str = "", call: int = -1) -> int:
        """Queue a transfer, and return its ticket for `wait`; `what` and `call` are for the record."""
        self._issued += 1
        if self.record is not None:
            self.record.issued(self._issued, what, call)
        self._queue.append((self._issued, seconds))
        return self._issued

    def issue_background(self, seconds: float) -> None:
        """Add a transfer of lowest priority: it runs while the queue is empty, until `wait_for_all`."""
        self._background_seconds += seconds

    def wait_for_all(self) -> None:
        """Stall the main stream until every transfer has ended."""
        self.wait(self._issued)
        begin = self.clock_seconds
        self.clock_seconds += self._background_seconds
        self.stall_seconds += self._background_seconds
        self._background_seconds = 0.0
        if self.record is not None:
            self.record.main(STALL, begin, self.clock_seconds)
            if self.clock_seconds > begin:
                self.record.proceeds(_BACKGROUND, begin)
            self.record.ended(_BACKGROUND, self.clock_seconds)

    def run_exposed(self, seconds: float) -> None:
        """Run a transfer that nothing overlaps: the main stream stalls, and queued transfers do not progress."""
        self.clock_seconds += seconds
        self.stall_seconds += seconds
        if self.record is not None:
            self.record.main(STALL, self.clock_seconds - seconds, self.clock_seconds)

    def run(self, seconds: float, links: frozenset[str] = frozenset()) -> None:
        """Run compute of the main stream, or its communication over `links`."""
        begin = self.clock_seconds
        if self.links.isdisjoint(links):
            while seconds > 0 and (self._queue or self._background_seconds > 0):
                seconds -= self._run_overlapped(seconds)
        self.clock_seconds += seconds
        if self.record is not None:
            self.record.main(EXPOSED if links else COMPUTE, begin, self.clock_seconds, links)

    def _run_overlapped(self, seconds: float) -> float:
        """Run until the main stream's work or the next transfer ends, and return the work that was done."""
        left = self._queue[0][1] if self._queue else self._background_seconds
        done = left * (1.0 - self.contention)
        if seconds < done:
            done, elapsed = seconds, seconds / (1.0 - self.contention)
        else:
            elapsed = left
        self.clock_seconds += elapsed
        self.stall_seconds += elapsed - done
        self._advance(elapsed)
        return done

    def wait(self, ticket: int) -> None:
        """Stall the main stream until the transfer has ended."""
        begin = self.clock_seconds
        while self._queue and self._done < ticket:
            left = self._queue[0][1]
            self.clock_seconds += left
            self.stall_seconds += left
            self._advance(left)
        if self.record is not None:
            self.record.main(STALL, begin, self.clock_seconds)

    def _advance(self, seconds: float) -> None:
        """Let the next transfer progress; `seconds` is at most what is left of it."""
        if self.record is not None:
            self.record.proceeds(self._queue[0][0] if self._queue else _BACKGROUND, self.clock_seconds - seconds)
        if not self._queue:
            self._background_seconds = max(0.0, self._background_seconds - seconds)
            if self.record is not None and not self._background_seconds:
                self.record.ended(_BACKGROUND, self.clock_seconds)
        elif seconds >= self._queue[0][1]:
            self._done = self._queue.popleft()[0]
            if self.record is not None:
                self.record.ended(self._done, self.clock_seconds)
        else:
            ticket, left = self._queue[0]
            self._queue[0] = ticket, left - seconds
