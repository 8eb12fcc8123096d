"""Placement conversions on a data axis whose ranks have uneven shards of the batch (7 examples as 4 + 3).

What the axis shards is so many elements of each part for every example. Collectives take equal parts: shards are padded to the
largest, and trimmed afterwards. An all-to-all is a gather and a slice.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.autograd import apply
from ..compat.collectives import all_gather, all_reduce, reduce_scatter, wait_tensor
from ..device.axis import AxisHandle
from .conversions import AxisOperation, apply_locally, parse_conversion


class _ConvertUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, axis: AxisHandle, x: torch.Tensor) -> torch.Tensor:
        ctx.text, ctx.axis = text, axis
        return _applied(parse_conversion(text)[0], x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, _applied(parse_conversion(ctx.text)[1], grad, ctx.axis)


def convert_uneven(x: torch.Tensor, axis: AxisHandle, text: str) -> torch.Tensor:
    """Return `x` in another placement on an axis with `shares`."""
    return apply(_ConvertUneven, text, axis, x)  # type: ignore[no-any-return]


def _applied(operation: AxisOperation, x: torch.Tensor, axis: AxisHandle) -> torch.Tensor:
    dim, parts = operation.dim % max(1, x.dim()), operation.parts
    if operation.kind == "gather":
        return _gathered(x, dim, parts, axis)
    if operation.kind == "reduce_scatter":
        return _scattered_sum(x, dim, parts, operation.op, axis)
    if operation.kind == "slice":
        return _own(x, dim, parts, axis)
    if operation.kind == "all_to_all":
        return _own(_gathered(x, dim, parts, axis), operation.to % x.dim(), operation.to_parts, axis)
    if operation.kind == "all_reduce":
        return wait_tensor(all_reduce(x.contiguous(), operation.op, axis.group_name))
    if operation.kind == "pad":
        apart = x.unflatten(dim, (parts, -1))
        width = apart.shape[dim + 1] // axis.shares[axis.coordinate]
        whole = x.new_zeros((*apart.shape[: dim + 1], width * sum(axis.shares), *apart.shape[dim + 2 :]))
        axis.part(whole, dim + 1).copy_(apart)
        return whole.flatten(dim, dim + 1)
    return apply_locally(operation, x, axis.size, axis.coordinate)


def _own(x: torch.Tensor, dim: int, parts: int, axis: AxisHandle) -> torch.Tensor:
    """A copy of this rank's part of a whole dimension."""
    own = axis.part(x.unflatten(dim, (parts, -1)), dim + 1).flatten(dim, dim + 1)
    return own.clone(memory_format=torch.contiguous_format)


def _padded(x: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """Return the tensor with zeros behind, to `extent`."""
    if x.shape[dim] == extent:
        return x.contiguous()
    return torch.cat((x, x.new_zeros((*x.shape[:dim], extent - x.shape[dim], *x.shape[dim + 1 :]))), dim)


def _gathered(x: torch.Tensor, dim: int, parts: int, axis: AxisHandle) -> torch.Tensor:
    apart = x.unflatten(dim, (parts, -1))
    width = apart.shape[dim + 1] // axis.shares[axis.coordinate]
    padded = _padded(apart, dim + 1, width * max(axis.shares))
    received = wait_tensor(all_gather(padded.view(-1), axis.size, axis.group_name)).view(axis.size, *padded.shape)
    trimmed = [each.narrow(dim + 1, 0, width * share) for each, share in zip(received, axis.shares, strict=True)]
    return torch.cat(trimmed, dim + 1).flatten(dim, dim + 1)


def _scattered_sum(x: torch.Tensor, dim: int, parts: int, op: str, axis: AxisHandle) -> torch.Tensor:
    apart = x.unflatten(dim, (parts, -1))
    width = apart.shape[dim + 1] // sum(axis.shares)
    pieces = apart.split([width * share for share in axis.shares], dim + 1)
    stacked = torch.stack([_padded(piece, dim + 1, width * max(axis.shares)) for piece in pieces])
    received = wait_tensor(reduce_scatter(stacked.view(-1), op, axis.size, axis.group_name)).view(stacked.shape[1:])
    return received.narrow(dim + 1, 0, width * axis.shares[axis.coordinate]).flatten(dim, dim + 1).contiguous()
