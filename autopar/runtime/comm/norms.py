"""Norms of sharded tensors as wholes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..compat.dtensor import local_of, whole
from .heartbeat import glancing


def whole_norms(tensors: Sequence[DTensor], order: float = 2.0) -> torch.Tensor:
    """The norms of tensors on one mesh, each as a whole ``[tensors]``, in float32 or longer, equal on all ranks. One small
    all-reduce for each axis that some are sharded on."""
    tensors, mesh = list(map(whole, tensors)), tensors[0].device_mesh
    parts = list(map(local_of, tensors))
    none = 0.0 if order >= 0 else math.inf
    norms = torch._foreach_norm([part if part.numel() else part.new_full((1,), none) for part in parts], order)
    values = torch.stack([norm.to(torch.promote_types(torch.float32, norm.dtype)) for norm in norms])
    with glancing("the norms of a list of tensors"):
        for axis in range(mesh.ndim):
            sharded = [not isinstance(each.placements[axis], Replicate) for each in tensors]
            if mesh.size(axis) > 1 and any(sharded):
                reduced = norm_over_ranks(values, order, mesh.get_group(axis))
                values = reduced if all(sharded) else torch.where(torch.tensor(sharded, device=values.device), reduced, values)
    return values


def norm_over_ranks(norms: torch.Tensor, order: float, group: dist.ProcessGroup) -> torch.Tensor:
    """The norms of what the ranks of a group have together, from the norms of their parts."""
    if math.isinf(order):
        return extremes_over_ranks(norms, order > 0, group)
    powers = norms.pow(order) if order else norms.clone()  # of order 0 it is a count
    dist.all_reduce(powers, dist.ReduceOp.SUM, group)
    return powers.pow(1.0 / order) if order else powers


def extremes_over_ranks(values: torch.Tensor, largest: bool, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest of the ranks' values, or the smallest, and NaN where a rank has NaN, as torch's `amax`. gloo and NCCL leave
    NaN out, or not, by the order of the ranks."""
    lost, sign = values.isnan(), 1 if largest else -1
    rows = torch.stack((torch.where(lost, 0.0, values * sign), lost.to(values.dtype)))
    dist.all_reduce(rows, dist.ReduceOp.MAX, group)
    return torch.where(rows[1] > 0, math.nan, rows[0] * sign)
