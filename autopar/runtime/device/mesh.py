"""The device mesh of a running program: one handle for each mesh axis, process groups, and this rank's coordinates."""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..compat.async_tp import Groups
from ..compat.collectives import group_name
from ..errors import LaunchProblem
from .axis import AxisHandle, shares_of
from .groups import shared_mesh
from .offload import HostMemory
from .rendezvous import JOIN_SECONDS, Meeting, meet
from .rng import MOVED, SEEDED, seed_stream

DATA_AXIS = "dp"
PIPELINE_AXIS = "pp"
CONTEXT_AXIS = "cp"
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"
"""The data axis as two (HSDP): between the copies of the state, and the ranks that share one copy."""


_WHOLE_BATCH = 15_485_863
"""Added to the seed where data ranks compute the whole batch, or share its examples."""


class MeshHandle:
    """The device mesh ``{"dp": 2, "tp": 2}`` over the processes that torchrun started. An axis that is missing has one rank.

    The first axis may be ``pp``, the pipeline: `axes`, `device_mesh` and all that is placed on them belong to this rank's stage,
    `whole_mesh` spans all stages.
    """

    pp: AxisHandle
    dp: AxisHandle
    cp: AxisHandle
    seed_offset = base_seed = 0
    script_seed: tuple[int, int, int] | None = None
    """`SeedStreams.script_seed` of this rank where streams began, or `reseed` was called; None before the first call."""
    own_examples = all_examples = 0
    """The examples of this data rank, and of all, where they have uneven shards of the batch."""
    async_tp: Groups = frozenset()
    """The groups whose collectives run in pieces beside products in compiled blocks (`async_tp_groups`)."""

    def __init__(self, axes: Mapping[str, int], *, seed: int = 0) -> None:
        self.axes = {name: size for name, size in axes.items() if name != PIPELINE_AXIS} or {DATA_AXIS: 1}
        self.opaque_modules: Mapping[str, nn.Module] = {}  # the code of the model's opaque modules by path (`ops.control_flow`)
        self.launched_axes = self.axes  # those of the ranks, also where a variant divides the data axis in another way
        self.pipeline_axes = {PIPELINE_AXIS: axes[PIPELINE_AXIS]} if PIPELINE_AXIS in axes else {}
        self.device = self._join(self.pipeline_axes | self.axes)
        self.whole_mesh, self.device_mesh = self._meshes(self.axes)
        self.pp = self._handle(PIPELINE_AXIS, self.pipeline_axes.get(PIPELINE_AXIS, 1), self.whole_mesh)
        self._begin(seed)
        self.handles = {name: self._handle(name, size, self.device_mesh) for name, size in self.axes.items()}
        for name in (DATA_AXIS, "tp", "ep", *self.axes):
            setattr(self, name, self.axis(name))
        self.group_state(0)

    def _join(self, axes: Mapping[str, int]) -> torch.device:
        device = join_process_group(prod(axes.values()), axes)
        self.host_memory = HostMemory(device)
        seed_stream.restart(seed_stream.moved_to or 0)  # streams of an earlier mesh may have advanced differently on other ranks
        return device

    def _meshes(self, axes: dict[str, int]) -> tuple[DeviceMesh, DeviceMesh]:
        """The mesh of all stages, and that of this rank's stage."""
        sizes = self.pipeline_axes | axes
        whole = shared_mesh(self.device.type, sizes)
        return whole, whole[tuple(axes)] if self.pipeline_axes else whole

    def _handle(self, name: str, size: int, mesh: DeviceMesh) -> AxisHandle:
        if size == 1:
            return AxisHandle(name)
        return AxisHandle(name, size, mesh.get_local_rank(name), group_name(mesh, name))

    def group_state(self, group_size: int) -> None:
        """Shard one copy of the state over `group_size` neighbours on the data axis, and replicate it between such groups
        (HSDP); 0 shards over the whole axis.

        State is placed on `state_mesh`, whose axes are `state_axes`; `shard_axis` is the axis that one copy is sharded over.
        """
        self.state_axes, self.state_mesh, self.shard_axis = self.axes, self.device_mesh, self.dp
        size = self.dp.size
        if group_size in (0, size):
            return
        if size % group_size:
            raise LaunchProblem(f"state on groups of {group_size} does not divide dp={size}: plan again with a divisor, or 0")
        self.state_axes = self.divided_axes(group_size)
        _, self.state_mesh = self._meshes(self.state_axes)
        self.shard_axis = self._handle(SHARD_AXIS, group_size, self.state_mesh)

    def divided_axes(self, group_size: int, names: tuple[str, str] = (REPLICATE_AXIS, SHARD_AXIS)) -> dict[str, int]:
        """Return the axes with the data axis as two: between the copies of the state, and the `group_size` ranks that share
        one."""
        halves = {names[0]: self.dp.size // group_size, names[1]: group_size}
        axes: dict[str, int] = {}
        for name, count in self.axes.items():
            axes |= halves if name == DATA_AXIS else {name: count}
        return axes

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh for FSDP2: the data axis, or (replicate, shard) for HSDP."""
        if self.state_mesh is self.device_mesh:
            return self.device_mesh[DATA_AXIS]
        return self.state_mesh[REPLICATE_AXIS, SHARD_AXIS]

    def axis(self, name: str) -> AxisHandle:
        """The handle of an axis; one of size 1 where the mesh has no axis of that name."""
        return self.handles.get(name) or AxisHandle(name)

    @property
    def model_axes(self) -> tuple[AxisHandle, ...]:
        """All axes but the data axis, in order."""
        return tuple(handle for name, handle in self.handles.items() if name != DATA_AXIS)

    def group(self, name: str) -> dist.ProcessGroup:
        """The process group of an axis of the program, of its state, or of the pipeline."""
        if name == PIPELINE_AXIS:
            return self.whole_mesh.get_group(name)
        return (self.device_mesh if name in self.axes else self.state_mesh).get_group(name)

    def group_names(self, name: str) -> set[str]:
        """The names of that group: torch's, and that of the program's collectives."""
        handles = (*self.handles.values(), self.shard_axis, self.pp)
        return {str(self.group(name).group_name), *(each.group_name for each in handles if each.name == name and each.group_name)}

    @property
    def pipeline_groups(self) -> list[list[int]]:
        """The ranks of each pipeline group, by stage: ranks that have equal coordinates on all other axes."""
        size = prod(self.launched_axes.values())
        return [[stage * size + place for stage in range(self.pp.size)] for place in range(size)]

    def describe(self, rank: int) -> str:
        """A rank by its number and its coordinates, for messages."""
        words, left = [], rank
        for name, size in reversed((self.pipeline_axes | self.launched_axes).items()):
            words.append(f"{name}={left % size}")
            left //= size
        return f"rank {rank} ({', '.join(reversed(words))})"

    def data_coordinate(self, rank: int) -> int:
        """The coordinate of a rank on the data axis."""
        names = list(self.launched_axes)
        if DATA_AXIS not in names:
            return 0
        inner = prod(self.launched_axes[name] for name in names[names.index(DATA_AXIS) + 1 :])
        return rank // inner % self.launched_axes[DATA_AXIS]

    def rank_in_stage(self, stage: int) -> int:
        """The rank in another stage that has this rank's coordinates on all other axes."""
        size = prod(self.launched_axes.values())
        return stage * size + dist.get_rank() % size

    def for_variant(self, whole_batch: bool, uneven_batch: int = 0, context: int = 1) -> MeshHandle:
        """This mesh for another program of the same ranks. With `whole_batch` its data axis has one rank: every data rank
        computes the whole batch, with random streams of its own, which all data ranks share. With `context` the data axis is two:
        so many neighbours share an example, and are an axis that shards its sequence. With an `uneven_batch` of so many examples
        data ranks have uneven shards of it."""
        other = copy.copy(self)
        if whole_batch and self.dp.size > 1:
            other.axes = {name: 1 if name == DATA_AXIS else size for name, size in self.axes.items()}
            other.dp = AxisHandle(DATA_AXIS)
            other.handles = self.handles | {DATA_AXIS: other.dp}
            other.seed_offset = _WHOLE_BATCH
            other._set_seed(other.seed + _WHOLE_BATCH)
        if context > 1:
            other.axes = self.divided_axes(context, (DATA_AXIS, CONTEXT_AXIS))
            _, mesh = self._meshes(other.axes)
            other.handles = {name: self._handle(name, size, mesh) for name, size in other.axes.items()}
            other.dp, other.cp = other.handles[DATA_AXIS], other.handles[CONTEXT_AXIS]
            other.seed_offset = _WHOLE_BATCH
            other._set_seed(other.seed + _WHOLE_BATCH)
        if uneven_batch:
            other.dp = replace(self.dp, shares=shares_of(uneven_batch, self.dp.size))
            other.handles = self.handles | {DATA_AXIS: other.dp}
            other.own_examples, other.all_examples = other.dp.shares[other.dp.coordinate], uneven_batch
        return other

    def _set_seed(self, seed: int) -> None:
        self.seed = seed
        self.seed_tensor = torch.tensor(seed % (1 << 62), device="cpu")  # keys of streams are of that many bits

    def _begin(self, seed: int) -> None:
        self.base_seed = seed
        self._set_seed(seed + self.pp.coordinate * 1_000_003 + self.seed_offset)

    def reseed(self, seed: int) -> None:
        """Restart all random streams from `seed`; each stage has streams of its own."""
        self._begin(seed)
        self.script_seed = seed_stream.script_seed()
        seed_stream.restart()

    def seed_change(self) -> tuple[int, int, int]:
        """Return what the script has done to torch's generator of this rank since (`SEEDED`, `MOVED`, 0), its seed, and the place
        of the streams."""
        now = seed_stream.script_seed()
        if now == self.script_seed:
            return 0, 0, seed_stream.place
        moved = self.script_seed is not None and now[:2] == self.script_seed[:2]
        return (MOVED if moved else SEEDED), now[1], seed_stream.place_of_script()

    def follow_seed(self, change: int, seed: int, place: int) -> None:
        """Begin the random streams as the script's generators do. All ranks pass the largest change, seed and place of all."""
        if change == SEEDED:
            self._begin(seed)
        if change:
            self.script_seed = seed_stream.script_seed()
        seed_stream.follow(place, seed if change == SEEDED else None)


class BlockMesh:
    """The mesh as one block sees it: some of its axes have handles of their own."""

    def __init__(self, mesh: MeshHandle, handles: Mapping[str, AxisHandle]) -> None:
        vars(self).update(handles, mesh=mesh)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["mesh"], name)


UNFINISHED: set[Any] = set()
"""The checkpoints that `shut_down` waits for (`wait`): being written, or could not be written and nobody was told."""

STARTED: WeakSet[Any] = WeakSet()
"""The heartbeats that `shut_down` ends (`close`): they would take ranks that end one after the other for dead."""

_SETTLING_SECONDS = 0.1


def shut_down() -> None:
    """Ends what was started, when all ranks are done: waits for checkpoints that are being written, then for all ranks, and
    leaves the process group. What comes after it runs, on each rank alone. CheckpointProblem on all ranks where the last
    checkpoint could not be written. In a ``finally`` it does nothing while an exception is on its way: nobody is waited for then.
    """
    if sys.exc_info()[0] is not None or not dist.is_initialized():
        return
    for each in list(UNFINISHED):
        each.wait()
    dist.barrier()
    for started in list(STARTED):
        started.close()
    dist.destroy_process_group()
    # A thread of gloo that still frees the tensors of the last collective waits for the interpreter, and CPython 3.11 aborts
    # where that ends meanwhile (seen twice, on a loaded machine): the main thread leaves it to them for a while.
    gc.collect()
    time.sleep(_SETTLING_SECONDS)


def launched_processes() -> int:
    """Return the number of processes of the run that this one is of."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def join_process_group(
    size: int,
    axes: Mapping[str, int],
    *,
    join_seconds: float = JOIN_SECONDS,
    connecting: Callable[[Meeting], AbstractContextManager[Any]] = nullcontext,
) -> torch.device:
    """Join the process group and return this rank's device. LaunchProblem where another number of processes was launched, or
    one has not come after `join_seconds`. `connecting` is a context around the work that needs those that came."""
    words = " x ".join(f"{name}={count}" for name, count in axes.items())
    launched = launched_processes()
    if launched != size:
        raise LaunchProblem(
            f"this program is for {size} processes ({words}) but {launched} were launched; "
            f"use torchrun --nproc-per-node {size} or make a plan for {launched}"
        )
    gpu = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", "0"))
    if not dist.is_initialized():
        backend = "nccl" if gpu else "gloo"
        if "WORLD_SIZE" in os.environ:
            meeting = meet(join_seconds)
            with connecting(meeting):
                dist.init_process_group(backend, store=meeting.store, rank=meeting.rank, world_size=meeting.size)
        else:
            dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if not gpu or dist.get_backend() == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
