"""Two streams of one device: computing (with everything that it must wait for), and transfers behind it, in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Streams:
    """A clock, and a queue of transfers on the data axis. The main stream computes, or uses a link itself; a transfer advances
    while time passes, except while the main stream occupies a physical link of `names` (main has priority there). Meanwhile the
    main stream loses `contention` of its speed. `waited` is what it stood still, or lost so."""

    names: frozenset[str]
    contention: float = 0.0
    clock: float = 0.0
    waited: float = 0.0
    _behind: float = 0.0
    _queue: deque[tuple[int, float]] = field(default_factory=deque)
    _issued: int = 0
    _done: int = 0

    def issue(self, seconds: float) -> int:
        """Queues a transfer; the returned number is what `wait` takes."""
        self._issued += 1
        self._queue.append((self._issued, seconds))
        return self._issued

    def behind(self, seconds: float) -> None:
        """A transfer that runs when no queued one does, until `settle`."""
        self._behind += seconds

    def settle(self) -> None:
        """The main stream stands still until everything has arrived."""
        self.wait(self._issued)
        self.clock += self._behind
        self.waited += self._behind
        self._behind = 0.0

    def expose(self, seconds: float) -> None:
        """A transfer now: the main stream stands still, and nothing else is sent."""
        self.clock += seconds
        self.waited += seconds

    def run(self, seconds: float, links: frozenset[str] = frozenset()) -> None:
        """The main stream is busy, with `links` where it communicates."""
        if not self.names.isdisjoint(links):
            self.clock += seconds
            return
        while seconds > 0 and (self._queue or self._behind > 0):
            seconds -= self._together(seconds)
        self.clock += seconds

    def _together(self, seconds: float) -> float:
        """The main stream's work until it or the next transfer ends."""
        left = self._queue[0][1] if self._queue else self._behind
        done = left * (1.0 - self.contention)
        if seconds < done:
            done, elapsed = seconds, seconds / (1.0 - self.contention)
        else:
            elapsed = left
        self.clock += elapsed
        self.waited += elapsed - done
        self._advance(elapsed)
        return done

    def wait(self, transfer: int) -> None:
        """The main stream stands still until the transfer has ended."""
        while self._queue and self._done < transfer:
            left = self._queue[0][1]
            self.clock += left
            self.waited += left
            self._advance(left)

    def _advance(self, seconds: float) -> None:
        """No more than the next transfer."""
        if not self._queue:
            self._behind = max(0.0, self._behind - seconds)
        elif seconds >= self._queue[0][1]:
            self._done = self._queue.popleft()[0]
        else:
            number, left = self._queue[0]
            self._queue[0] = number, left - seconds
