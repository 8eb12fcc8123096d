"""Convolution, pooling and interpolation of images that are sharded along dimension `dim`: halo exchange, then the local one.
Weights are whole on every rank, and their gradients are partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...compat.autograd import apply
from ...device.axis import AxisHandle
from .halo import Halo, split_gradient, with_halo

Sizes = int | Sequence[int]


def each(value: Sizes, count: int) -> list[int]:
    """An argument as one number for each of `count` dimensions."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed


def without(value: list[int], at: int, put: int = 0) -> list[int]:
    """The list with `put` at one place."""
    return [put if index == at else item for index, item in enumerate(value)]


class _Convolution(torch.autograd.Function):
    """Saves the shard, the weight and the neighbours' rows, and pads the shard once more in the backward: a padded copy would be
    saved beside the shard itself."""

    @staticmethod
    def forward(
        ctx: Any, halo: Halo, stride: list[int], padding: list[int], dilation: list[int], groups: int,
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        rows = halo.exchange(x)
        ctx.halo, ctx.options, ctx.has_bias = halo, (stride, padding, dilation, groups), bias is not None
        ctx.save_for_backward(x, weight, *rows)
        return torch.convolution(halo.padded(x, rows), weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *rows = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.options
        needed = [bool(need) for need in ctx.needs_input_grad[5:]]
        to_padded, to_weight, to_bias = torch.ops.aten.convolution_backward(
            grad, ctx.halo.padded(x, (rows[0], rows[1])), weight, [weight.shape[0]] if ctx.has_bias else None,
            stride, padding, dilation, False, [0] * len(stride), groups, needed,
        )  # fmt: skip
        to_x = split_gradient(ctx.halo, to_padded, x.shape[ctx.halo.dim]) if needed[0] else None
        return None, None, None, None, None, to_x, to_weight, to_bias


def convolution_halo(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1, padding: Sizes | str = 0,
    dilation: Sizes = 1, groups: int = 1, *, dim: int, axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """``conv1d`` to ``conv3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = weight.dim() - 2, dim - 2
    stride, dilation = each(stride, count), each(dilation, count)
    reach = [rate * (size - 1) for rate, size in zip(dilation, weight.shape[2:], strict=True)]
    if isinstance(padding, str):
        padding = [size // 2 if padding == "same" else 0 for size in reach]
    padding = each(padding, count)
    halo = Halo.on(axis, dim, padding[at], max(0, reach[at] + 1 - stride[at] - padding[at]))
    return apply(_Convolution, halo, stride, without(padding, at), dilation, groups, x, weight, bias)  # type: ignore[no-any-return]


def transposed_convolution_halo(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1, *, dim: int, axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """``conv_transpose1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim`, whose result is `stride` times as long."""
    count, at = weight.dim() - 2, dim - 2
    stride, padding, dilation = each(stride, count), each(padding, count), each(dilation, count)
    before = (dilation[at] * (weight.shape[dim] - 1) - padding[at]) // stride[at]
    halo = Halo.on(axis, dim, before, -(-padding[at] // stride[at]))
    more = without(each(output_padding, count), at)
    whole = torch.conv_transpose1d if count == 1 else torch.conv_transpose2d if count == 2 else torch.conv_transpose3d
    out = whole(with_halo(x, halo), weight, bias, stride, without(padding, at), more, groups, dilation)
    return out.narrow(dim, stride[at] * before + padding[at], stride[at] * x.shape[dim])


_MAXIMUM = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
_LINEAR = ("linear", "bilinear", "trilinear")


def max_pool_halo(
    x: torch.Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1, *, dim: int, axis: AxisHandle
) -> torch.Tensor:
    """``max_pool1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = x.dim() - 2, dim - 2
    kernel, padding, dilation = each(kernel, count), each(padding, count), each(dilation, count)
    stride = each(stride, count) or kernel
    after = max(0, dilation[at] * (kernel[at] - 1) + 1 - stride[at] - padding[at])
    whole = with_halo(x, Halo.on(axis, dim, padding[at], after, float("-inf")))
    return _MAXIMUM[count - 1](whole, kernel, stride, without(padding, at), dilation)


def avg_pool_halo(
    x: torch.Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, *, dim: int, axis: AxisHandle
) -> torch.Tensor:
    """``avg_pool1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = x.dim() - 2, dim - 2
    kernel, padding = each(kernel, count), each(padding, count)
    stride = each(stride, count) or kernel
    whole = with_halo(x, Halo.on(axis, dim, padding[at], max(0, kernel[at] - stride[at] - padding[at])))
    return _AVERAGE[count - 1](whole, kernel, stride, without(padding, at))


def interpolate_halo(
    x: torch.Tensor, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None = None, *, dim: int,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """``upsample_linear1d``, ``bilinear2d``, ``trilinear3d`` of ``x[n, c, ...]``, sharded along `dim`, which becomes a whole
    number of times as long; `size` is that of this rank. Beyond the image its outermost row is repeated, as in the operation."""
    at, rows, mode = dim - 2, x.shape[dim], _LINEAR[x.dim() - 3]
    whole = with_halo(x, Halo.on(axis, dim, 1, 1, None))
    if align_corners:
        larger = list(size or [int(length * scale) for length, scale in zip(x.shape[2:], scales or (), strict=True)])
        others = F.interpolate(whole, size=without(larger, at, rows + 2), mode=mode, align_corners=True)
        return _aligned_rows(others, rows, larger[at], dim, axis)
    times = round(scales[at]) if size is None and scales is not None else size[at] // rows  # type: ignore[index]
    given = None if size is None else without(list(size), at, times * (rows + 2))
    factors = list(scales) if size is None and scales is not None else None
    out = F.interpolate(whole, size=given, scale_factor=factors, mode=mode, align_corners=False)
    return out.narrow(dim, times, times * rows)


def _aligned_rows(x: torch.Tensor, rows: int, wanted: int, dim: int, axis: AxisHandle) -> torch.Tensor:
    """`wanted` rows of this rank between its `rows` rows and one on either side, corners of the whole image aligned. Row `o` of
    the image lies at ``o (total - 1) / (result - 1)``, between rows that this rank has; computed as the operation does."""
    exact = torch.float64 if x.dtype is torch.float64 else torch.float32
    total, result, first = rows * axis.size, wanted * axis.size, axis.coordinate * rows - 1
    scale = torch.tensor(total - 1, dtype=exact) / (result - 1)
    at = torch.arange(axis.coordinate * wanted, (axis.coordinate + 1) * wanted, device=x.device).to(exact) * scale.to(x.device)
    below = at.long().clamp_max(total - 1)
    share = (at - below).view(-1, *[1] * (x.dim() - 1 - dim))
    one, two = (x.index_select(dim, index - first).to(exact) for index in (below, (below + 1).clamp_max(total - 1)))
    return (one * (1 - share) + two * share).to(x.dtype)
