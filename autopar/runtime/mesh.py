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
from .host import Host
from .rng import stream

DATA_AXIS = "dp"
PIPELINE_AXIS = "pp"
COPY_AXIS = "dp_copy"
SHARD_AXIS = "dp_shard"
"""The data axis in two, where only neighbours share one copy of the state: between the copies, and in one of them."""


class MeshHandle:
    """Built from ``{"dp": 2, "tp": 2}`` over the processes that torchrun started. Axes that are missing have one rank.

    An axis ``pp``, the first, is the pipeline: `axes`, `device_mesh` and all that is placed on them are those of this rank's
    stage, `whole_mesh` has all stages.
    """

    pp: AxisHandle
    dp: AxisHandle
    tp: AxisHandle
    tp2: AxisHandle
    ep: AxisHandle

    def __init__(self, axes: Mapping[str, int], *, seed: int = 0) -> None:
        self.axes = {name: size for name, size in axes.items() if name != PIPELINE_AXIS} or {DATA_AXIS: 1}
        self.stages = {PIPELINE_AXIS: axes[PIPELINE_AXIS]} if PIPELINE_AXIS in axes else {}
        everything = self.stages | self.axes
        self.device = join(prod(everything.values()), everything)
        self.host = Host(self.device)
        self.whole_mesh, self.device_mesh = self._meshes(self.axes)
        self.pp = _handle(PIPELINE_AXIS, self.stages.get(PIPELINE_AXIS, 1), self.whole_mesh)
        self.reseed(seed)  # streams of an earlier mesh stand at other places on other ranks
        self.handles = {name: _handle(name, size, self.device_mesh) for name, size in self.axes.items()}
        for name in (DATA_AXIS, "tp", "tp2", "ep", *self.axes):
            setattr(self, name, self.axis(name))
        self.share_state(0)

    def _meshes(self, axes: dict[str, int]) -> tuple[DeviceMesh, DeviceMesh]:
        """Of all stages, and of this rank's."""
        sizes = self.stages | axes
        whole = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return whole, whole[tuple(axes)] if self.stages else whole

    def share_state(self, neighbours: int) -> None:
        """One copy of the state lies on so many neighbours of the data axis (0: on all of it), each copy on others (HSDP).

        `state_axes` and `state_mesh` are what state is placed on, `shard` is the axis of one copy.
        """
        self.state_axes, self.state_mesh, self.shard = self.axes, self.device_mesh, self.dp
        size = self.dp.size
        if neighbours in (0, size):
            return
        if size % neighbours:
            raise LaunchProblem(f"state on groups of {neighbours} does not divide dp={size}: plan again with a divisor, or 0")
        halves = {COPY_AXIS: size // neighbours, SHARD_AXIS: neighbours}
        self.state_axes = {}
        for name, count in self.axes.items():
            self.state_axes |= halves if name == DATA_AXIS else {name: count}
        _, self.state_mesh = self._meshes(self.state_axes)
        self.shard = _handle(SHARD_AXIS, neighbours, self.state_mesh)

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """What FSDP2 takes: the data axis, or copies and the shards of one."""
        if self.state_mesh is self.device_mesh:
            return self.device_mesh[DATA_AXIS]
        return self.state_mesh[COPY_AXIS, SHARD_AXIS]

    def axis(self, name: str) -> AxisHandle:
        """The handle of an axis, of size 1 where the mesh has none of that name."""
        return self.handles.get(name) or AxisHandle(name)

    @property
    def model_axes(self) -> tuple[AxisHandle, ...]:
        """All axes but the data axis, in order."""
        return tuple(handle for name, handle in self.handles.items() if name != DATA_AXIS)

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of an axis, of the program or of its state, or of the pipeline."""
        if name == PIPELINE_AXIS:
            return self.whole_mesh.get_group(name)
        return (self.device_mesh if name in self.axes else self.state_mesh).get_group(name)

    @property
    def columns(self) -> list[list[int]]:
        """The processes at each place of a stage, by stage."""
        size = prod(self.axes.values())
        return [[stage * size + place for stage in range(self.pp.size)] for place in range(size)]

    def describe(self, rank: int) -> str:
        """A process by its number and its place on the axes."""
        words, left = [], rank
        for name, size in reversed((self.stages | self.axes).items()):
            words.append(f"{name}={left % size}")
            left //= size
        return f"rank {rank} ({', '.join(reversed(words))})"

    def global_rank(self, stage: int) -> int:
        """The process at this rank's place in another stage."""
        size = prod(self.axes.values())
        return stage * size + dist.get_rank() % size

    def reseed(self, seed: int) -> None:
        """Starts all dropout masks afresh; stages draw from streams of their own."""
        self.seed = seed + self.pp.coordinate * 1_000_003
        stream.cache_clear()


def _handle(name: str, size: int, mesh: DeviceMesh) -> AxisHandle:
    if size == 1:
        return AxisHandle(name)
    return AxisHandle(name, size, mesh.get_local_rank(name), group_name(mesh, name))


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
