"""Activation offloading: tensors that lie in host memory between forward and backward. On CUDA the copies overlap with
computation."""

from __future__ import annotations

import weakref

import torch

from ..compat.autograd import storage_span
from .axis import AxisHandle


class HostMemory:
    """Copies between one device and host memory, on a CUDA stream of their own, in the order in which they are asked for.

    traced: tensors that the compiled code of a block has returned for its caller to offload, or to partition over an axis
        (`Recompute.save_traced` takes them at the end of the call).
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last_call: weakref.ref[OffloadedCall] | None = None
        self.traced = list[tuple[torch.Tensor, AxisHandle | None]]()

    def copy_to_host(self, x: torch.Tensor) -> torch.Tensor:
        """Start a copy to (pinned) host memory and return it."""
        if self.stream is None:
            return x.to("cpu", copy=True)
        on_host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self.stream):
            on_host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)
        return on_host

    def copy_to_device(self, on_host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start a copy to the device; return it, and the event that it is complete at."""
        if self.stream is None:
            return on_host.to(device, copy=True), None
        with torch.cuda.stream(self.stream):
            x = on_host.to(device, non_blocking=True)
            return x, self.stream.record_event()


class SavedSpan:
    """The part of a storage that a tensor spans, saved elsewhere than on this device from when autograd first saves a view of it
    (`store`) until the backward first needs one (`result`, the part as one flat tensor)."""

    def __init__(self, x: torch.Tensor) -> None:
        self.device, self.dtype = x.device, x.dtype
        self.start, self.end = storage_span(x)
        self.on_device: torch.Tensor | None = x.detach().as_strided((self.end - self.start,), (1,), self.start)

    def covers(self, x: torch.Tensor) -> bool:
        start, end = storage_span(x)
        return self.dtype == x.dtype and self.start <= start and end <= self.end

    def store(self) -> None:
        raise NotImplementedError

    def result(self) -> torch.Tensor:
        raise NotImplementedError


class OffloadedCall:
    """The tensors that one call of a block offloads. When the backward needs the first of them, all are copied back, and those of
    the call before it, which the backward needs next: two calls' tensors are on the device then, as the plan has it."""

    def __init__(self, host: HostMemory) -> None:
        self.host, self.tensors = host, list[weakref.ref[OffloadedTensor]]()
        self.previous: weakref.ref[OffloadedCall] | None = None

    def add(self, tensor: OffloadedTensor) -> None:
        """Note a tensor whose copy to host memory starts."""
        if not self.tensors:
            self.previous, self.host.last_call = self.host.last_call, weakref.ref(self)
        self.tensors.append(weakref.ref(tensor))

    def prefetch(self) -> None:
        """Start the copies back to the device, in the order in which the backward needs them."""
        for each in reversed(self.tensors):
            if (tensor := each()) is not None:
                tensor.prefetch()


class OffloadedTensor(SavedSpan):
    """A span in host memory, from where it is copied back by the time that the backward needs it."""

    def __init__(self, x: torch.Tensor, call: OffloadedCall) -> None:
        super().__init__(x)
        self.call = call
        self.on_host: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def store(self) -> None:
        """Start the copy to host memory, if it has not started."""
        if self.on_host is None and self.on_device is not None:
            self.on_host, self.on_device = self.call.host.copy_to_host(self.on_device), None
            self.call.add(self)

    def prefetch(self) -> torch.Tensor:
        """Start the copy back to the device, if it has not started."""
        if self.on_device is None:
            assert self.on_host is not None
            self.on_device, self.copied = self.call.host.copy_to_device(self.on_host, self.device)
            self.on_host = None
        return self.on_device

    def result(self) -> torch.Tensor:
        """Return the part on the device, and prefetch what the backward needs next."""
        x = self.prefetch()
        self.call.prefetch()
        if (previous := self.call.previous) is not None and (call := previous()) is not None:
            call.prefetch()
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.copied)
            x.record_stream(stream)
        return x
