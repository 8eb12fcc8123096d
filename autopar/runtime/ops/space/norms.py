"""Norms and means of images that are sharded along a dimension of space: statistics are sums over the axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ...compat.autograd import apply
from ...compat.collectives import all_reduce, wait_tensor
from ...device.axis import AxisHandle
from ..functions import full_precision


class _GroupNorm(torch.autograd.Function):
    """Two all-reduces of one number for each group of channels in the forward, one of two in the backward. Statistics of half
    precision are in float32; weight and bias get the partial sums of this rank."""

    @staticmethod
    def forward(
        ctx: Any, axis: AxisHandle, groups: int, epsilon: float, x: torch.Tensor, weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        wide = _grouped(x, groups)
        count = wide.shape[-1] * axis.size
        mean = _total(wide.sum(-1, keepdim=True), axis) / count
        centered = wide - mean
        scale = (_total((centered * centered).sum(-1, keepdim=True), axis) / count + epsilon).rsqrt()
        normal = (centered * scale).view(x.shape)
        ctx.axis, ctx.groups, ctx.count = axis, groups, count
        ctx.save_for_backward(x, weight, mean, scale)
        if weight is not None:
            normal = normal * _channels(weight, x)
        return (normal if bias is None else normal + _channels(bias, x)).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        normal = (_grouped(x, ctx.groups) - mean) * scale
        dims = [dim for dim in range(x.dim()) if dim != 1]
        needs = ctx.needs_input_grad[3:]
        to_weight = (grad * normal.view(x.shape)).sum(dims).to(grad.dtype) if needs[1] else None
        to_bias = grad.sum(dims) if needs[2] else None
        to_x = None
        if needs[0]:
            inner = _grouped(grad if weight is None else grad * _channels(weight, x), ctx.groups)
            sums = _total(torch.stack((inner.sum(-1, keepdim=True), (inner * normal).sum(-1, keepdim=True))), ctx.axis)
            to_x = ((inner - (sums[0] + normal * sums[1]) / ctx.count) * scale).view(x.shape).to(x.dtype)
        return None, None, None, to_x, to_weight, to_bias


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return ``[n, groups, elements]``, in full precision."""
    return full_precision(x).reshape(x.shape[0], groups, prod(x.shape[1:]) // groups)


def _channels(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return parameter.view(1, -1, *[1] * (x.dim() - 2))


def _total(part: torch.Tensor, axis: AxisHandle) -> torch.Tensor:
    return wait_tensor(all_reduce(part, "sum", axis.group_name))


def group_norm_space(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, epsilon: float = 1e-5,
    cudnn: bool = False, *, dim: int, axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Return ``F.group_norm`` of ``x[n, c, ...]``, sharded along `dim`, whose statistics are those of the whole image."""
    return apply(_GroupNorm, axis, groups, epsilon, x, weight, bias)  # type: ignore[no-any-return]


def instance_norm_space(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *options: Any, dim: int, axis: AxisHandle
) -> torch.Tensor:
    """Return ``F.instance_norm`` of ``x[n, c, ...]`` without running statistics, sharded along `dim`; `options` are the
    operation's other arguments, of which the fifth is epsilon."""
    return apply(_GroupNorm, axis, x.shape[1], options[4], x, weight, bias)  # type: ignore[no-any-return]


def mean_space(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False, *, dim: int, axis: AxisHandle) -> torch.Tensor:
    """The summand of this rank of ``x.mean(dims, keepdim)`` of images that are sharded along `dim`."""
    return x.mean(tuple(dims), keepdim) / axis.size


def adaptive_avg_pool_space(x: torch.Tensor, ones: Sequence[int], *, dim: int, axis: AxisHandle) -> torch.Tensor:
    """The summand of this rank of an adaptive mean to one pixel of ``x[n, c, ...]``, sharded along `dim`."""
    whole = F.adaptive_avg_pool2d if x.dim() == 4 else F.adaptive_avg_pool3d
    return whole(x, ones[0]) / axis.size
