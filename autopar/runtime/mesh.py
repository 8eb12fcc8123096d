"""The device mesh of a running program: one handle per axis, and what this rank is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axis import AxisHandle
from .compat import group_name
from .errors import LaunchProblem
from .rng import generator

DATA_AXIS = "dp"


class MeshHandle:
    """Built from ``{"dp": 2, "tp": 2}`` over the processes that torchrun started. Axes that are missing have one rank."""

    dp: AxisHandle
    tp: AxisHandle
    tp2: AxisHandle

    def __init__(self, axes: Mapping[str, int], *, seed: int = 0) -> None:
        self.axes = dict(axes) if axes else {DATA_AXIS: 1}
        self.reseed(seed)  # generators of an earlier mesh stand at other places on other ranks
        self.device = join(prod(self.axes.values()), self.axes)
        self.device_mesh: DeviceMesh = init_device_mesh(
            self.device.type, tuple(self.axes.values()), mesh_dim_names=tuple(self.axes)
        )
        self.handles = {name: self._handle(name) for name in self.axes}
        for name in (DATA_AXIS, "tp", "tp2", *self.axes):
            setattr(self, name, self.axis(name))

    def _handle(self, name: str) -> AxisHandle:
        size = self.axes[name]
        if size == 1:
            return AxisHandle(name)
        return AxisHandle(name, size, self.device_mesh.get_local_rank(name), group_name(self.device_mesh, name))

    def axis(self, name: str) -> AxisHandle:
        """The handle of an axis, of size 1 where the mesh has none of that name."""
        return self.handles.get(name) or AxisHandle(name)

    @property
    def model_axes(self) -> tuple[AxisHandle, ...]:
        """All axes but the data axis, in order."""
        return tuple(handle for name, handle in self.handles.items() if name != DATA_AXIS)

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of an axis."""
        return self.device_mesh.get_group(name)

    def reseed(self, seed: int) -> None:
        """Starts all dropout masks afresh."""
        self.seed = seed
        generator.cache_clear()


def finish() -> None:
    """Ends this process when all ranks are done, with exit status 0; the last line of a script.

    Python's own way out is left aside: CPython 3.11 ends threads that wait for the interpreter by unwinding them, and a thread of
    gloo that is just then letting go of the last collective's tensors aborts on it (seen twice, on a loaded machine).
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def join(size: int, axes: Mapping[str, int]) -> torch.device:
    """Joins the process group, refuses another number of processes, and says which device is this rank's."""
    words = " x ".join(f"{name}={count}" for name, count in axes.items())
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if launched != size:
        raise LaunchProblem(
            f"this program is for {size} processes ({words}) but {launched} were launched; "
            f"use torchrun --nproc-per-node {size} or make a plan for {launched}"
        )
    gpu = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        backend = "nccl" if gpu else "gloo"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if not gpu or dist.get_backend() == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
