"""Process groups and meshes that all models of a process share: nothing frees those of torch.distributed, and each group of gloo
keeps threads and descriptors.

Models in one process compute one after another, on all ranks in the same order, so that their collectives never meet. What runs
beside the steps (a thread that writes a checkpoint, batches that overlap) has groups of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_Value = TypeVar("_Value")

_SHARED: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
"""The groups by the default process group, with which all other groups end. Torch's own list has a group on its members only, and
all ranks have to know whether one is there."""


def several_ranks() -> bool:
    """Return whether this process runs with others, neither alone nor in a dry run."""
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def shared_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of the axes over all ranks. All ranks must call."""
    names, counts = tuple(sizes), tuple(sizes.values())
    return shared((device_type, names, counts), lambda: init_device_mesh(device_type, counts, mesh_dim_names=names))


def shared_group(purpose: str, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """The group of these ranks (None: of all) for a purpose, whose collectives come in one order. All ranks must call; one
    that is no member gets what torch gives it."""
    key = (purpose, None if ranks is None else tuple(ranks), backend)
    members = None if ranks is None else list(ranks)
    group: dist.ProcessGroup = shared(key, lambda: dist.new_group(members, backend=backend, group_desc=f"autopar {purpose}"))
    return group


def members_group(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """The group of these ranks as in `shared_group`, which they alone call for."""

    options: dict[str, Any] = {"group_desc": f"autopar {purpose}", "use_local_synchronization": True}
    group: dist.ProcessGroup = shared((purpose, tuple(ranks)), lambda: dist.new_group(list(ranks), **options))
    return group


def control_group() -> dist.ProcessGroup:
    """The group of all ranks for small tensors of the host. It is no program's: a rank that is ahead of the others asks here
    while they wait for it elsewhere, and gloo ends a process whose collective meets another one."""
    return shared_group("control", backend="gloo")


def shared(key: Hashable, make: Callable[[], _Value]) -> _Value:
    """Return what all models of the default process group have in common, made at the first call for it."""
    values = _SHARED.setdefault(dist.group.WORLD, {})
    if key not in values:
        values[key] = make()
    value: _Value = values[key]
    return value
