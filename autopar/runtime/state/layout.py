"""The shard of a full tensor that a rank stores, and the DTensor placements that say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from ..comm.conversions import local_shard, shard_of
from ..comm.convert import convert
from ..compat.dtensor import strided_shard
from ..device.mesh import DATA_AXIS, REPLICATE_AXIS, SHARD_AXIS, MeshHandle
from ..errors import StateError


class ShardSpec(NamedTuple):
    """One sharding on the way from the full tensor to the local one; `parts` counts those of what the earlier axes left."""

    axis: str
    dim: int
    parts: int


def shard_specs(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> tuple[ShardSpec, ...]:
    """The shardings on model axes in mesh order. StateError where a dimension does not divide."""
    out: list[ShardSpec] = []
    extents = list(shape)
    wanted = {
        axis: (shard[0] % len(shape), shard[1])
        for axis in mesh.model_axes
        if axis.size > 1 and (shard := shard_of(placements.get(axis.name, "I"))) is not None
    }
    for axis, (dim, parts) in wanted.items():
        whole = prod(other.size for other, (its_dim, its_parts) in wanted.items() if its_dim == dim and its_parts < parts)
        if parts % whole or extents[dim] % (parts // whole * axis.size):
            raise StateError(f"shape {tuple(shape)} does not divide for {placements[axis.name]} on {axis.name}={axis.size}")
        extents[dim] //= axis.size
        out.append(ShardSpec(axis.name, dim, parts // whole))
    return tuple(out)


def local_shape(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> tuple[int, ...]:
    """The shape that one coordinate of the model axes stores, before ZeRO."""
    out = list(shape)
    for spec in shard_specs(shape, placements, mesh):
        out[spec.dim] //= mesh.axis(spec.axis).size
    return tuple(out)


def model_shard(full: torch.Tensor, placements: Mapping[str, str], mesh: MeshHandle) -> torch.Tensor:
    """This rank's shard of a full tensor over the model axes, before ZeRO."""
    for spec in shard_specs(full.shape, placements, mesh):
        axis = mesh.axis(spec.axis)
        full = local_shard(full, spec.dim, spec.parts, axis.size, axis.coordinate)
    return full


def own_positions(
    shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle, zero: int | None, order: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The positions along each dimension of a full tensor that this rank stores, under ZeRO along `zero` (None: without it).
    `order`: the positions of dimension 0 in the order in which they are sharded."""
    positions = [torch.arange(extent) for extent in shape]
    if order is not None:
        positions[0] = order.cpu()
    for spec in shard_specs(shape, placements, mesh):
        axis = mesh.axis(spec.axis)
        positions[spec.dim] = local_shard(positions[spec.dim], 0, spec.parts, axis.size, axis.coordinate)
    if zero is not None:
        positions[zero] = zero_shard(positions[zero], 0, mesh)
    return positions


def zero_shard(local: torch.Tensor, dim: int | None, mesh: MeshHandle) -> torch.Tensor:
    """ZeRO's shard of a rank's tensor along `dim` (None: the tensor); the last ranks' shards may be shorter or empty."""
    if dim is None:
        return local
    extent = -(-local.shape[dim] // mesh.shard_axis.size)
    start = min(mesh.shard_axis.coordinate * extent, local.shape[dim])
    return local.narrow(dim, start, min(extent, local.shape[dim] - start))


def gather_full(
    local: torch.Tensor, shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle, dim: int | None
) -> torch.Tensor:
    """The full tensor on every rank, from the stored shards: all shardings undone in reverse."""
    with torch.no_grad():
        local = local.to(mesh.device)  # state of an optimizer may lie in host memory
        if dim is not None:
            local = gather_zero(local, local_shape(shape, placements, mesh)[dim], mesh, dim)
        for spec in reversed(shard_specs(shape, placements, mesh)):
            local = convert(local, mesh.axis(spec.axis), f"S({spec.dim},{spec.parts}) -> R")
        return local.clone()


def gather_zero(local: torch.Tensor, extent: int, mesh: MeshHandle, dim: int) -> torch.Tensor:
    """The tensor of `extent` along `dim` that `zero_shard` took this shard of, on every rank that shares one copy."""
    padded = list(local.shape)
    padded[dim] = -(-extent // mesh.shard_axis.size)
    filled = local.new_zeros(padded)
    filled.narrow(dim, 0, local.shape[dim]).copy_(local)
    return convert(filled, mesh.shard_axis, f"S({dim}) -> R").narrow(dim, 0, extent)


def zero_dim(shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle) -> int | None:
    """The dimension that ZeRO shards over the ranks that share one copy of the state; None where no sharding can be written as a
    DTensor.

    The first dimension that divides; if there is none, the first one unevenly (FSDP2 and DTensor both pad it).
    """
    size = mesh.shard_axis.size
    local = local_shape(shape, placements, mesh)
    model = shard_specs(shape, placements, mesh)
    by_dim = {dim: [spec for spec in model if spec.dim == dim] for dim in range(len(shape))}
    for dim, specs in by_dim.items():
        parts = specs[0].parts if specs else 1
        if local[dim] % size == 0 and (all(spec.parts == 1 for spec in specs) or (len(specs) == 1 and parts % size == 0)):
            return dim
    if shape and not by_dim[0] and local[0] > 0:
        return 0
    return None


def dtensor_placements(
    shape: Sequence[int], placements: Mapping[str, str], mesh: MeshHandle, sharded_dim: int | None
) -> tuple[Any, ...]:
    """Return one DTensor placement for each axis of the state's mesh. ZeRO's sharding, of `sharded_dim`, is applied last but
    written first, since the data axis is outermost."""
    model = {spec.axis: spec for spec in shard_specs(shape, placements, mesh)}
    out: list[Any] = []
    for name in mesh.state_axes:
        spec = model.get(name)
        if name == REPLICATE_AXIS:
            out.append(Replicate())
        elif name in (DATA_AXIS, SHARD_AXIS):
            out.append(Replicate() if sharded_dim is None else _data_placement(sharded_dim, tuple(model.values()), mesh))
        elif spec is None:
            out.append(Replicate())
        elif spec.parts == 1:
            out.append(Shard(spec.dim))
        else:
            whole = mesh.shard_axis.size if spec.dim == sharded_dim else 1
            out.append(strided_shard(spec.dim, spec.parts // whole) if spec.parts > whole else Shard(spec.dim))
    return tuple(out)


def _data_placement(dim: int, model: tuple[ShardSpec, ...], mesh: MeshHandle) -> Any:
    inside = [spec for spec in model if spec.dim == dim]
    if not inside or inside[0].parts > 1:
        return Shard(dim)
    return strided_shard(dim, prod(mesh.axis(spec.axis).size for spec in inside))
