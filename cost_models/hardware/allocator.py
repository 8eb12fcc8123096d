"""Device memory of a training process: from the tensors in it to what the allocator reserves and what the device shows.

The planner, `autopar validate` and the dry run all take these formulas; there are no other factors of memory.

* **Allocated**: the tensors. PyTorch's caching allocator rounds each up to 512 bytes, which is nothing beside the tensors of a
  model.
* **Reserved**: segments of 2 MiB (tensors below 1 MiB), 20 MiB (below 10 MiB) or a multiple of 2 MiB, in which tensors are placed
  (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallBuffer, kLargeBuffer, kRoundLarge). A segment belongs to one stream,
  and what is left between its tensors serves only what fits there. Parameters and optimizer state are allocated once, one after
  another, and leave no holes; what a step allocates and frees does: `FRAGMENTATION`.
* **Shown** by the device (nvidia-smi): reserved, the context of the process (``base_gib`` of the cluster's file), and the buffers
  of every communicator of the collective library.

When an allocation fails, the allocator gives segments without tensors back and tries again (`release_cached_blocks`), so that a
run may go on, slower, with less than it would reserve: a run is sure not to fit only where its tensors do not (`least`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.hardware.device_specs import Device
from autopar.ir.mesh import DATA_AXIS, Mesh

FRAGMENTATION = 0.25
"""Reserved beyond allocated, as a share of what a step allocates and frees. Eager FSDP2 without pressure reserves 1.25 to 1.26
of it (torchtitan's H100 runs of 2024-12, tt-001, tt-004 and tt-007 of the published table), and the 59 runs of BigScience that
were measured by nvidia-smi have their least median error there."""

_BUFFER_BYTES = 4 * 2**20 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
"""Buffers of one connection of one channel of NCCL, for its three protocols: Simple (DEFAULT_BUFFSIZE, 4 MiB), LL128
(NCCL_LL128_ELEMS_PER_THREAD x NCCL_LL128_MAX_NTHREADS x NCCL_STEPS x 8 bytes), LL (NCCL_LL_LINES_PER_THREAD x
NCCL_LL_MAX_NTHREADS x NCCL_STEPS x 16 bytes); src/include/device.h."""

_CHANNELS = 24
"""Channels that NCCL's search finds on eight devices behind NVSwitches (DGX A100 and H100: "24 coll channels" in its log)."""

_CONNECTIONS = 3
"""Connections of a channel that receive: the ring's, and up and down the tree."""

COMMUNICATOR_BYTES = _CHANNELS * _CONNECTIONS * _BUFFER_BYTES
"""0.65 GiB, where a cluster's file does not say otherwise (``communicator_mib``). Memory is linear in the number of communicators
and in that of channels (NVIDIA/nccl issues 864 and 986)."""

MEMORY_MARGIN = 0.09
"""Share of the memory that a plan leaves free by default: so much that of the runs whose memory was published at most one in
fifty takes more than the rest (``tests/support/published_runs.py`` computes it, and a test compares)."""

ALLOCATED_ONCE = ("parameters", "optimizer", "buffers", "inputs")
"""Kinds of memory (`step.memory_events.KINDS`) that live from step to step; the others are allocated and freed in each."""

NOT_TENSORS = ("slack", "base")
"""Kinds that are no tensors: what the allocator reserves beyond them; context and communicators."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one process, by how they are measured: `allocated` (tensors), `reserved` (segments of the allocator), `shown` (by
    the device), `least` (what it cannot do without: it runs out of memory where there is less)."""

    allocated: float
    reserved: float
    shown: float

    @property
    def least(self) -> float:
        return self.shown - self.reserved + self.allocated


def fragmentation(device: Device) -> float:
    """Return `FRAGMENTATION` under a caching allocator; 0 on a CPU, where freed memory goes back to the machine."""
    return 0.0 if device.kind == "cpu" else FRAGMENTATION


def process_bytes(device: Device, communicators: int) -> float:
    """Return the bytes of context, other models and communicators. (Those of gloo take nothing worth counting.)"""
    return device.base_bytes + device.held_bytes + communicators * device.communicator_bytes


def device_memory(tensors: Mapping[str, float], device: Device, communicators: int) -> DeviceMemory:
    """Return the memory of tensors by kind; entries of `NOT_TENSORS` do not count."""
    allocated = sum(size for kind, size in tensors.items() if kind not in NOT_TENSORS)
    once = sum(tensors.get(kind, 0.0) for kind in ALLOCATED_ONCE)
    reserved = allocated + fragmentation(device) * (allocated - once)
    return DeviceMemory(allocated, reserved, reserved + process_bytes(device, communicators))


def communicator_count(mesh: Mesh, zero_group: int = 0, stages: int = 1) -> int:
    """Count the communicators of a program: one for each axis of several ranks, two more where the state is sharded over groups
    on the data axis, and that of all ranks where there are several axes (runtime/device/mesh.py)."""
    axes = sum(axis.size > 1 for axis in mesh.axes) + (stages > 1)
    groups = 2 * (zero_group not in (0, mesh.size_of(DATA_AXIS)))
    return axes + groups + (axes > 1)


def tensor_budget_bytes(device: Device, communicators: int = 0) -> float:
    """Return what reserved memory may take within the budget of the device: the margin, context and communicators are off."""
    return device.budget_bytes - process_bytes(device, communicators)
