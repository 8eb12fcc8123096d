"""Pooling and interpolation of images that are sharded along dimension `dim`: halo exchange, then the local operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...device.axis import AxisHandle
from .convolution import Sizes, each, without
from .halo import Halo, with_halo

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
