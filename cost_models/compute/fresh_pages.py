"""Seconds that the operating system takes to map the pages of new tensors on a CPU.

The C library keeps freed memory for the next tensor, but not that of large ones: from its mmap threshold on (glibc raises it to
32 MiB at most, mallopt(3), M_MMAP_THRESHOLD) each tensor is new memory, whose pages the kernel maps and clears when they are
written first. GPUs do not do so: PyTorch's allocator keeps their memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cost_models.hardware.device_specs import Device

MMAP_THRESHOLD_BYTES = 2**25


def fresh_page_seconds(device: Device, tensor_bytes: Iterable[float]) -> float:
    """Return the seconds of new tensors of these sizes on one device; 0 where the device says nothing of it."""
    if not device.fresh_page_bytes_per_second:
        return 0.0
    return sum(size for size in tensor_bytes if size >= MMAP_THRESHOLD_BYTES) / device.fresh_page_bytes_per_second
