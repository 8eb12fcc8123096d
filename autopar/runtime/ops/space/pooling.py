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
    assert not align_corners
    at, rows = dim - 2, x.shape[dim]
    times = round(scales[at]) if size is None and scales is not None else size[at] // rows  # type: ignore[index]
    larger = None if size is None else without(list(size), at, times * (rows + 2))
    factors = list(scales) if size is None and scales is not None else None
    whole = with_halo(x, Halo.on(axis, dim, 1, 1, None))
    out = F.interpolate(whole, size=larger, scale_factor=factors, mode=_LINEAR[x.dim() - 3], align_corners=False)
    return out.narrow(dim, times, times * rows)
