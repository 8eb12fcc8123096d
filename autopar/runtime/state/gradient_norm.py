"""The norm of all gradients, exact for every mixture of shardings, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..device.mesh import MeshHandle


def _sharded_axes(gradient: DTensor) -> tuple[bool, ...]:
    """For each mesh axis whether ranks hold different shards (otherwise each holds the full tensor, which is counted once)."""
    return tuple(not isinstance(placement, Replicate) for placement in gradient.placements)


def total_norm(gradients: Iterable[DTensor], mesh: MeshHandle, norm_type: float) -> torch.Tensor:
    """The norm over all elements of all tensors of all stages, a scalar equal on all ranks; one small all-reduce for each axis.

    In a pipeline it is float64: stages may have gradients of different dtypes, or none.
    """
    top = math.isinf(norm_type)
    value = _stage_norm(gradients, mesh, norm_type)
    if mesh.pp.size > 1:
        value = value.double()
        dist.all_reduce(value, dist.ReduceOp.MAX if top else dist.ReduceOp.SUM, mesh.group(mesh.pp.name))
    return value if top else value.pow(1.0 / norm_type)


def _stage_norm(gradients: Iterable[DTensor], mesh: MeshHandle, norm_type: float) -> torch.Tensor:
    """The stage's largest absolute element, or the sum of powers."""
    groups: dict[tuple[bool, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_sharded_axes(gradient), []).append(gradient.to_local())
    if not groups:
        return torch.zeros((), device=mesh.device)
    top = math.isinf(norm_type)
    sums = []
    for locals_ in groups.values():
        norms = torch.stack(torch._foreach_norm([t if t.numel() else t.new_zeros(1) for t in locals_], norm_type))
        sums.append(norms.max() if top else norms.pow(norm_type).sum())
    values = torch.stack([value.to(torch.promote_types(torch.float32, value.dtype)) for value in sums])
    for index, name in enumerate(mesh.state_axes):
        sharded = torch.tensor([axes[index] for axes in groups], device=mesh.device)
        if mesh.state_axes[name] > 1 and bool(sharded.any()):
            reduced = values.clone()
            dist.all_reduce(reduced, dist.ReduceOp.MAX if top else dist.ReduceOp.SUM, mesh.group(name))
            values = torch.where(sharded, reduced, values)
    return values.max() if top else values.sum()


@torch.no_grad()
def clip_gradients(
    gradients: list[DTensor], counted: list[DTensor], mesh: MeshHandle, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scales all gradients so that their norm is at most `max_norm`; returns the norm before. `counted`: those that no other
    stage counts."""
    norm = total_norm(counted, mesh, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(factor.to(gradient.dtype))
    return norm
