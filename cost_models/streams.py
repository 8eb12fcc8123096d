"""Two streams of one device: computing (with everything that it must wait for), and transfers behind it, in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Streams:
    """A clock, and a queue of transfers on the data axis. The main stream computes, or uses a link itself; a transfer advances
    while time passes, except while the main stream occupies a physical link of `names` (main has priority there)."""

    names: frozenset[str]
    clock: float = 0.0
    waited: float = 0.0
    _queue: deque[tuple[int, float]] = field(default_factory=deque)
    _issued: int = 0
    _done: int = 0

    def issue(self, seconds: float) -> int:
        """Queues a transfer; the returned number is what `wait` takes."""
        self._issued += 1
        self._queue.append((self._issued, seconds))
        return self._issued

    def run(self, seconds: float, links: frozenset[str] = frozenset()) -> None:
        """The main stream is busy, with `links` where it communicates."""
        self.clock += seconds
        if self.names.isdisjoint(links):
            self._transfer(seconds)

    def wait(self, transfer: int) -> None:
        """The main stream stands still until the transfer has ended."""
        while self._queue and self._done < transfer:
            left = self._queue[0][1]
            self.clock += left
            self.waited += left
            self._transfer(left)

    def _transfer(self, seconds: float) -> None:
        while self._queue and seconds >= self._queue[0][1]:
            number, left = self._queue.popleft()
            seconds -= left
            self._done = number
        if self._queue and seconds > 0:
            number, left = self._queue[0]
            self._queue[0] = number, left - seconds
