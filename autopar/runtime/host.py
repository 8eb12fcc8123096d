"""Tensors that wait in host memory between forward and backward. On CUDA the copies run beside the computation."""

from __future__ import annotations

import weakref

import torch


class Host:
    """The way to host memory and back for one device: a stream of copies, which run in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: weakref.ref[Parked] | None = None

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """A copy on the host; it may still be on its way."""
        if self.stream is None:
            return x.to("cpu", copy=True)
        there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            there.copy_(x, non_blocking=True)
        x.record_stream(self.stream)
        return there

    def bring(self, there: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy on the device, and when it will have arrived."""
        if self.stream is None:
            return there.to(device, copy=True), None
        with torch.cuda.stream(self.stream):
            x = there.to(device, non_blocking=True)
            return x, self.stream.record_event()


def span(x: torch.Tensor) -> tuple[int, int]:
    """The elements of its storage that a tensor lies in: from, to."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return int(x.storage_offset()), int(x.storage_offset() + last + 1)


class Parked:
    """The piece of a storage that a tensor lies in: it goes, once, when something of it is first kept. It comes back when the
    backward first asks for it or for what left right after it; the last to leave is the first to be asked for."""

    def __init__(self, x: torch.Tensor, host: Host) -> None:
        self.host, self.device, self.dtype = host, x.device, x.dtype
        self.start, self.end = span(x)
        self.here: torch.Tensor | None = x.detach().as_strided((self.end - self.start,), (1,), self.start)
        self.there: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self.before: weakref.ref[Parked] | None = None

    def covers(self, x: torch.Tensor) -> bool:
        start, end = span(x)
        return self.dtype == x.dtype and self.start <= start and end <= self.end

    def leave(self) -> None:
        if self.there is None and self.here is not None:
            self.there, self.here = self.host.send(self.here), None
            self.before, self.host.last = self.host.last, weakref.ref(self)

    def come(self) -> torch.Tensor:
        """Begins the way back."""
        if self.here is None:
            assert self.there is not None
            self.here, self.arrived = self.host.bring(self.there, self.device)
            self.there = None
        return self.here

    def result(self, _: int) -> torch.Tensor:
        """The piece as one flat tensor on the device."""
        x = self.come()
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.arrived)
            x.record_stream(stream)
            next_one = self.before() if self.before is not None else None
            if next_one is not None:
                next_one.come()
        return x
