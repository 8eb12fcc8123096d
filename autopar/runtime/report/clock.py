"""The time of the stream that computes: the host's clock on CPUs, events of the current stream on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Charge = Callable[[float, float], None]
"""Takes seconds of the clock, and of them the seconds of this thread's processor (0 on a GPU)."""


class Clock:
    """Gives the time between two marks to whoever is charged for it, at once."""

    def __init__(self) -> None:
        self.last = (0.0, 0.0)

    def start(self) -> None:
        """The first mark."""
        self.last = (time.perf_counter(), time.thread_time())

    def mark(self, charge: Charge) -> None:
        """Charges what has passed since the last mark."""
        now = (time.perf_counter(), time.thread_time())
        charge(now[0] - self.last[0], now[1] - self.last[1])
        self.last = now

    def settle(self) -> None:
        """Called at the end of a step, when all charges have to be known."""


class StreamClock(Clock):
    """Of the current CUDA stream: what it waits for counts, what the host does ahead of it does not. Charges are known after
    `settle`, which waits for the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.events: list[tuple[torch.cuda.Event, Charge | None]] = []

    def start(self) -> None:
        self.events = []
        self._record(None)

    def mark(self, charge: Charge) -> None:
        self._record(charge)

    def _record(self, charge: Charge | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.events.append((event, charge))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        for (before, _), (after, charge) in zip(self.events, self.events[1:], strict=False):
            if charge is not None:
                charge(before.elapsed_time(after) / 1e3, 0.0)
        self.events = self.events[-1:]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return StreamClock(device) if device.type == "cuda" else Clock()
