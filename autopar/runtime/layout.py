"""Which piece of a full tensor a rank stores, and how DTensor says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from .collectives import convert
from .compat import strided_shard
from .errors import StateProblem
from .mesh import COPY_AXIS, DATA_AXIS, SHARD_AXIS, MeshHandle
from .moves import chunk


class Cut(NamedTuple):
    """One sharding on the way from the full tensor to the local one; `parts` counts in what the earlier axes left."""

    axis: str
    dim: int
    parts: int


def cuts(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> tuple[Cut, ...]:
    """The shardings on model axes in mesh order. StateProblem where a dimension does not divide."""
    out: list[Cut] = []
    extents = list(shape)
    wanted = {axis.name: _shard(placements.get(axis.name, "I"), len(shape)) for axis in mesh.model_axes if axis.size > 1}
    for axis in mesh.model_axes:
        shard = wanted.get(axis.name)
        if shard is None:
            continue
        dim, parts = shard
        whole = prod(mesh.axis(name).size for name, other in wanted.items() if other and other[0] == dim and other[1] < parts)
        if parts % whole or extents[dim] % (parts // whole * axis.size):
            raise StateProblem(f"shape {tuple(shape)} does not divide for {placements[axis.name]} on {axis.name}={axis.size}")
        extents[dim] //= axis.size
        out.append(Cut(axis.name, dim, parts // whole))
    return tuple(out)


def _shard(text: str, ndim: int) -> tuple[int, int] | None:
    if not text.startswith("S("):
        return None
    dim, _, parts = text[2:-1].partition(",")
    return int(dim) % ndim, int(parts or 1)


def local_shape(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> tuple[int, ...]:
    """The shape that one coordinate of the model axes stores, before ZeRO."""
    out = list(shape)
    for cut in cuts(shape, placements, mesh):
        out[cut.dim] //= mesh.axis(cut.axis).size
    return tuple(out)


def local_part(full: torch.Tensor, placements: Mapping[str, str], mesh: MeshHandle) -> torch.Tensor:
    """This rank's piece of a full tensor, before ZeRO."""
    for cut in cuts(full.shape, placements, mesh):
        axis = mesh.axis(cut.axis)
        full = chunk(full, cut.dim, cut.parts, axis.size, axis.coordinate)
    return full


def data_part(piece: torch.Tensor, dim: int | None, mesh: MeshHandle) -> torch.Tensor:
    """What ZeRO leaves of a rank's piece: a chunk of dimension `dim`, the last ranks' shorter or empty."""
    if dim is None:
        return piece
    extent = -(-piece.shape[dim] // mesh.shard.size)
    start = min(mesh.shard.coordinate * extent, piece.shape[dim])
    return piece.narrow(dim, start, min(extent, piece.shape[dim] - start))


def whole(
    local: torch.Tensor, shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle, dim: int | None
) -> torch.Tensor:
    """The full tensor on every rank, from what each stores: the cuts undone in reverse."""
    with torch.no_grad():
        if dim is not None:
            extent = local_shape(shape, placements, mesh)[dim]
            padded = list(local.shape)
            padded[dim] = -(-extent // mesh.shard.size)
            filled = local.new_zeros(padded)
            filled.narrow(dim, 0, local.shape[dim]).copy_(local)
            local = convert(filled, mesh.shard, f"S({dim}) -> R").narrow(dim, 0, extent)
        for cut in reversed(cuts(shape, placements, mesh)):
            local = convert(local, mesh.axis(cut.axis), f"S({cut.dim},{cut.parts}) -> R")
        return local.clone()


def data_dim(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> int | None:
    """The dimension that ZeRO cuts over the ranks that share one copy, None where no cut can be written as a DTensor.

    The first dimension if it divides, else another that divides, else the first unevenly (FSDP2 and DTensor both pad it).
    """
    size = mesh.shard.size
    local = local_shape(shape, placements, mesh)
    model = cuts(shape, placements, mesh)
    by_dim = {dim: [cut for cut in model if cut.dim == dim] for dim in range(len(shape))}
    for dim, mine in by_dim.items():
        parts = mine[0].parts if mine else 1
        if local[dim] % size == 0 and (all(cut.parts == 1 for cut in mine) or (len(mine) == 1 and parts % size == 0)):
            return dim
    if shape and not by_dim[0] and local[0] > 0:
        return 0
    return None


def dtensor_placements(
    shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle, sharded_dim: int | None
) -> tuple[Any, ...]:
    """One DTensor placement per axis of the state's mesh; `sharded_dim` is ZeRO's, cut last but written first, as the data axis
    is outermost."""
    model = {cut.axis: cut for cut in cuts(shape, placements, mesh)}
    out: list[Any] = []
    for name in mesh.state_axes:
        cut = model.get(name)
        if name == COPY_AXIS:
            out.append(Replicate())
        elif name in (DATA_AXIS, SHARD_AXIS):
            out.append(Replicate() if sharded_dim is None else _data_placement(sharded_dim, tuple(model.values()), mesh))
        elif cut is None:
            out.append(Replicate())
        elif cut.parts == 1:
            out.append(Shard(cut.dim))
        else:
            whole = mesh.shard.size if cut.dim == sharded_dim else 1
            out.append(strided_shard(cut.dim, cut.parts // whole) if cut.parts > whole else Shard(cut.dim))
    return tuple(out)


def _data_placement(dim: int, model: tuple[Cut, ...], mesh: MeshHandle) -> Any:
    inside = [cut for cut in model if cut.dim == dim]
    if not inside or inside[0].parts > 1:
        return Shard(dim)
    return strided_shard(dim, prod(mesh.axis(cut.axis).size for cut in inside))
