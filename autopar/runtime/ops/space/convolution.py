"""Convolutions of images that are sharded along dimension `dim`: halo exchange, then the local convolution.
Weights are whole on every rank, and their gradients are partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
