"""Finds copies of a parameter or buffer that have drifted apart: ranks that replicate it compare checksums of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..comm.agreement import gather
from ..device.mesh import PIPELINE_AXIS
from ..errors import ReplicaProblem
from ..state.materialize import State
from .same_batch import checksum_on_device

_ABSENT = -(2**62)
"""In place of a checksum, on ranks that do not hold the tensor."""
_MOST_COMPARED = 1 << 22
"""Elements of a tensor whose values are compared where checksums differ."""
_NAMED = 4


class _Copy(NamedTuple):
    """What this rank holds of a parameter or buffer, and the axes along which other ranks hold the same."""

    tensor: torch.Tensor
    axes: frozenset[str]


class _Held(NamedTuple):
    """Ranks with equal `shard` hold copies of one tensor."""

    shard: tuple[int, ...]
    checksum: int


def _copies(state: State) -> Iterator[tuple[str, _Copy]]:
    """By name: parameters (also of other stages that hold them), and buffers, which all ranks of a stage hold."""
    axes = list(state.mesh.state_axes)
    for name, parameter in state.parameters.items():
        assert isinstance(parameter, DTensor)
        same = {axis for axis, placement in zip(axes, parameter.placements, strict=True) if isinstance(placement, Replicate)}
        yield name, _Copy(parameter.to_local(), frozenset((*same, PIPELINE_AXIS)))
    for name, buffer in state.buffers.items():
        yield name, _Copy(buffer, frozenset(axes))


@torch.no_grad()
def check_replicas(state: State, when: str) -> None:
    """ReplicaProblem on all ranks where copies differ in any bit. One small all-reduce for each mesh axis, and one of a flag; all
    ranks must call."""
    mesh, names = state.mesh, list(state.index.specs)
    held = dict(_copies(state))
    sums = torch.full((len(names),), _ABSENT, dtype=torch.int64, device=mesh.device)
    here = [number for number, name in enumerate(names) if name in held]
    if here:
        found = torch.stack([checksum_on_device(held[names[number]].tensor) for number in here]) & (2**62 - 1)
        sums[torch.tensor(here, device=mesh.device)] = found
    present = sums != _ABSENT
    both = torch.stack([sums, torch.where(present, -sums, sums)])
    differs = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for axis, size in ({PIPELINE_AXIS: mesh.pp.size} | mesh.state_axes).items():
        if size > 1:
            most = both.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, mesh.group(axis))
            compared = torch.tensor([name in held and axis in held[name].axes for name in names], device=mesh.device)
            differs += (compared & (most[0] != -most[1])).any()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if bool(differs):
        _raise_difference(state, held, dict(zip(names, sums.tolist(), strict=True)), when)


def _raise_difference(state: State, held: dict[str, _Copy], sums: dict[str, int], when: str) -> None:
    """Names the tensor and the ranks."""
    mesh = state.mesh
    mine = {
        name: _Held(
            tuple(_coordinate(mesh, axis) for axis in (PIPELINE_AXIS, *mesh.state_axes) if axis not in copy.axes), sums[name]
        )
        for name, copy in held.items()
    }
    every: list[dict[str, _Held]] = gather(mine)
    unequal = [name for name in sums if (groups := _groups(every, name)) and any(len(set(each.values())) > 1 for each in groups)]
    name = unequal[0]
    values = next(each for each in _groups(every, name) if len(set(each.values())) > 1)
    (usual, count), *rest = Counter(values.values()).most_common()
    odd = [rank for rank, value in values.items() if value != usual]
    right = next(rank for rank, value in values.items() if value == usual)
    named = ", ".join(mesh.describe(rank) for rank in odd[:_NAMED]) + (" ..." if len(odd) > _NAMED else "")
    by = _difference(held, name, right, odd[0])
    more = f" (and of {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    if count == rest[0][1]:
        text = f"{mesh.describe(right)} and {named} hold different copies of {name}{more}{by}, {when}"
    else:
        text = f"{named} of {len(values)} ranks has another copy of {name}{more} than {mesh.describe(right)}{by}, {when}"
    raise ReplicaProblem(
        f"{text}: something changed it on one rank alone (code under `if rank == 0`, a kernel that is not deterministic, faulty "
        "memory); load the last checkpoint on all ranks"
    )


def _groups(every: list[dict[str, _Held]], name: str) -> list[dict[int, int]]:
    """The checksums by rank of the ranks that should hold the same, for each shard."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, table in enumerate(every):
        if name in table:
            found.setdefault(table[name].shard, {})[rank] = table[name].checksum
    return list(found.values())


def _difference(held: dict[str, _Copy], name: str, one: int, other: int) -> str:
    """How far two ranks' copies are apart, in words; empty for large tensors, which are not sent."""
    mine: Any = None
    if dist.get_rank() in (one, other) and held[name].tensor.numel() <= _MOST_COMPARED:
        mine = held[name].tensor.detach().cpu().contiguous()
    every = gather(mine)
    if every[one] is None or every[other] is None:
        return ""
    apart = (every[one].double() - every[other].double()).abs()
    return f", by up to {float(apart.max()):.2g}"


def _coordinate(mesh: Any, axis: str) -> int:
    if axis == PIPELINE_AXIS:
        return int(mesh.pp.coordinate)
    return dist.get_rank(mesh.group(axis)) if mesh.state_axes[axis] > 1 else 0
