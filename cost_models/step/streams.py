"""The main stream of one device (compute and exposed communication) and its communication stream, which overlaps with it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


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
    _background_seconds: float = 0.0
    _queue: deque[tuple[int, float]] = field(default_factory=deque)
    _issued: int = 0
    _done: int = 0

    def issue(self, seconds: float) -> int:
        """Queue a transfer, and return its ticket for `wait`."""
        self._issued += 1
        self._queue.append((self._issued, seconds))
        return self._issued

    def issue_background(self, seconds: float) -> None:
        """Add a transfer of lowest priority: it runs while the queue is empty, until `wait_for_all`."""
        self._background_seconds += seconds

    def wait_for_all(self) -> None:
        """Stall the main stream until every transfer has ended."""
        self.wait(self._issued)
        self.clock_seconds += self._background_seconds
        self.stall_seconds += self._background_seconds
        self._background_seconds = 0.0

    def run_exposed(self, seconds: float) -> None:
        """Run a transfer that nothing overlaps: the main stream stalls, and queued transfers do not progress."""
        self.clock_seconds += seconds
        self.stall_seconds += seconds

    def run(self, seconds: float, links: frozenset[str] = frozenset()) -> None:
        """Run compute of the main stream, or its communication over `links`."""
        if not self.links.isdisjoint(links):
            self.clock_seconds += seconds
            return
        while seconds > 0 and (self._queue or self._background_seconds > 0):
            seconds -= self._run_overlapped(seconds)
        self.clock_seconds += seconds

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
        while self._queue and self._done < ticket:
            left = self._queue[0][1]
            self.clock_seconds += left
            self.stall_seconds += left
            self._advance(left)

    def _advance(self, seconds: float) -> None:
        """Let the next transfer progress; `seconds` is at most what is left of it."""
        if not self._queue:
            self._background_seconds = max(0.0, self._background_seconds - seconds)
        elif seconds >= self._queue[0][1]:
            self._done = self._queue.popleft()[0]
        else:
            ticket, left = self._queue[0]
            self._queue[0] = ticket, left - seconds
