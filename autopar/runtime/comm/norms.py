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
    extreme = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    has_powers = order != 0 and not math.isinf(order)  # of order 0 it is a count
    powers = norms.pow(order) if has_powers else norms.clone()
    dist.all_reduce(powers, extreme if math.isinf(order) else dist.ReduceOp.SUM, group)
    return powers.pow(1.0 / order) if has_powers else powers
