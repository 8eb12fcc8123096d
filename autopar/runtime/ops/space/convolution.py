"""Convolution, pooling and interpolation of images that are sharded along dimension `dim`: halo exchange, then the local one.
Weights are whole on every rank, and their gradients are partial sums.

Halo exchange: rows of the neighbours' shards beside this rank's own, and the gradients of these rows back to their owners. Rank r
of the axis holds the r-th of n equal shards. It sends its first `after` rows to rank r - 1 and its last `before` rows to rank r +
1. Beyond the first and the last shard there is what the operation pads with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...compat.autograd import apply
from ...compat.collectives import all_to_all_rows, wait_tensor
from ...device.axis import AxisHandle

Sizes = int | Sequence[int]


def each(value: Sizes, count: int) -> list[int]:
    """An argument as one number for each of `count` dimensions."""
    listed = [value] if isinstance(value, int) else list(value)
    return listed * count if len(listed) == 1 else listed


def without(value: list[int], at: int, put: int = 0) -> list[int]:
    """The list with `put` at one place."""
    return [put if index == at else item for index, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class Halo:
    """The `before` and `after` rows of dimension `dim` beside this rank's shard on `axis`; `fill` lies beyond the image (None:
    its outermost row once more)."""

    axis: AxisHandle
    dim: int
    before: int
    after: int
    fill: float | None = 0.0

    def exchange(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The `before` rows of the shard before, and the `after` rows of the one after."""
        rows = x.shape[self.dim]
        upwards, downwards = x.narrow(self.dim, 0, self.after), x.narrow(self.dim, rows - self.before, self.before)
        above, below = self._swap(upwards, downwards, self.before, self.after)
        return self._filled(above, x, self.before, 0), self._filled(below, x, self.after, rows - 1)

    def give_back(self, above: torch.Tensor, below: torch.Tensor, own: torch.Tensor) -> None:
        """Add the neighbours' gradients of this rank's rows to `own`, the gradient of its shard; `above` and `below` are its
        gradients of theirs."""
        rows = own.shape[self.dim]
        to_first, to_last = self._swap(above, below, self.after, self.before)
        if to_first is not None:
            own.narrow(self.dim, 0, self.after).add_(to_first)
        elif self.fill is None and self.before:
            own.narrow(self.dim, 0, 1).add_(above.sum(self.dim, keepdim=True))
        if to_last is not None:
            own.narrow(self.dim, rows - self.before, self.before).add_(to_last)
        elif self.fill is None and self.after:
            own.narrow(self.dim, rows - 1, 1).add_(below.sum(self.dim, keepdim=True))

    def padded(self, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The shard between `rows`."""
        return torch.cat((rows[0], x, rows[1]), self.dim)

    def _filled(self, rows: torch.Tensor | None, x: torch.Tensor, count: int, edge: int) -> torch.Tensor:
        """Return `rows`, or `count` rows of what lies beyond the image."""
        if rows is not None:
            return rows
        shape = [*x.shape[: self.dim], count, *x.shape[self.dim + 1 :]]
        return x.narrow(self.dim, edge, 1).expand(shape) if self.fill is None else x.new_full(shape, self.fill)

    def _swap(
        self, up: torch.Tensor, down: torch.Tensor, from_above: int, from_below: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send `up` to the rank before and `down` to the one after; the rows received from each (None: there is none)."""
        size, place = self.axis.size, self.axis.coordinate
        if size == 1:
            return None, None
        first, last = place == 0, place == size - 1
        shape = list(up.shape)
        row = up.numel() // up.shape[self.dim] if up.shape[self.dim] else down.numel() // max(1, down.shape[self.dim])
        send, receive = [0] * size, [0] * size
        parts = []
        if not first:
            send[place - 1], receive[place - 1] = up.numel(), from_above * row
            parts.append(up.reshape(-1))
        if not last:
            send[place + 1], receive[place + 1] = down.numel(), from_below * row
            parts.append(down.reshape(-1))
        flat = wait_tensor(all_to_all_rows(torch.cat(parts), receive, send, self.axis.group_name))
        above, below = flat.split([sum(receive[:place]), sum(receive[place:])])
        sides = []
        for part, count, beyond in ((above, from_above, first), (below, from_below, last)):
            shape[self.dim] = count
            sides.append(None if beyond else part.view(shape))
        return sides[0], sides[1]


class _WithHalo(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, x: torch.Tensor) -> torch.Tensor:
        ctx.halo, ctx.rows = halo, x.shape[halo.dim]
        return halo.padded(x, halo.exchange(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, split_gradient(ctx.halo, grad, ctx.rows)


def split_gradient(halo: Halo, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """The gradient of the shard of `rows` rows, from that of the shard with its halo."""
    above, own, below = grad.split([halo.before, rows, halo.after], halo.dim)
    own = torch.clone(own)
    halo.give_back(above, below, own)
    return own


def with_halo(x: torch.Tensor, halo: Halo) -> torch.Tensor:
    """The shard with the neighbours' rows. Differentiable."""
    if not halo.before and not halo.after:
        return x
    return apply(_WithHalo, halo, x)  # type: ignore[no-any-return]


# -- the operations


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
    """Return ``conv1d`` to ``conv3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = weight.dim() - 2, dim - 2
    stride, dilation = each(stride, count), each(dilation, count)
    reach = [rate * (size - 1) for rate, size in zip(dilation, weight.shape[2:], strict=True)]
    if isinstance(padding, str):
        padding = [size // 2 if padding == "same" else 0 for size in reach]
    padding = each(padding, count)
    halo = Halo(axis, dim, padding[at], max(0, reach[at] + 1 - stride[at] - padding[at]))
    return apply(_Convolution, halo, stride, without(padding, at), dilation, groups, x, weight, bias)  # type: ignore[no-any-return]


def transposed_convolution_halo(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Sizes = 1, padding: Sizes = 0,
    output_padding: Sizes = 0, groups: int = 1, dilation: Sizes = 1, *, dim: int, axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Return ``conv_transpose1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim`, whose result is `stride` times as long."""
    count, at = weight.dim() - 2, dim - 2
    stride, padding, dilation = each(stride, count), each(padding, count), each(dilation, count)
    before = (dilation[at] * (weight.shape[dim] - 1) - padding[at]) // stride[at]
    halo = Halo(axis, dim, before, -(-padding[at] // stride[at]))
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
    """Return ``max_pool1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = x.dim() - 2, dim - 2
    kernel, padding, dilation = each(kernel, count), each(padding, count), each(dilation, count)
    stride = each(stride, count) or kernel
    after = max(0, dilation[at] * (kernel[at] - 1) + 1 - stride[at] - padding[at])
    whole = with_halo(x, Halo(axis, dim, padding[at], after, float("-inf")))
    return _MAXIMUM[count - 1](whole, kernel, stride, without(padding, at), dilation)


def avg_pool_halo(
    x: torch.Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, *, dim: int, axis: AxisHandle
) -> torch.Tensor:
    """Return ``avg_pool1d`` to ``3d`` of ``x[n, c, ...]``, sharded along `dim` into shards that the stride divides."""
    count, at = x.dim() - 2, dim - 2
    kernel, padding = each(kernel, count), each(padding, count)
    stride = each(stride, count) or kernel
    whole = with_halo(x, Halo(axis, dim, padding[at], max(0, kernel[at] - stride[at] - padding[at])))
    return _AVERAGE[count - 1](whole, kernel, stride, without(padding, at))


def interpolate_halo(
    x: torch.Tensor, size: Sequence[int] | None, align_corners: bool, scales: Sequence[float] | None = None, *, dim: int,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Return ``upsample_linear1d``, ``bilinear2d`` or ``trilinear3d`` of ``x[n, c, ...]``, sharded along `dim`, which becomes a
    whole number of times as long; `size` is that of this rank. Beyond the image its outermost row is repeated, as in the
    operation."""
    at, rows, mode = dim - 2, x.shape[dim], _LINEAR[x.dim() - 3]
    whole = with_halo(x, Halo(axis, dim, 1, 1, None))
    if align_corners:
        larger = list(size or [int(length * scale) for length, scale in zip(x.shape[2:], scales or (), strict=True)])
        others = F.interpolate(whole, size=without(larger, at, rows + 2), mode=mode, align_corners=True)
        return _aligned_rows(others, rows, larger[at], dim, axis)
    times = round(scales[at]) if size is None and scales is not None else size[at] // rows  # type: ignore[index]
    larger_size = None if size is None else without(list(size), at, times * (rows + 2))
    factors = list(scales) if size is None and scales is not None else None
    out = F.interpolate(whole, size=larger_size, scale_factor=factors, mode=mode, align_corners=False)
    return out.narrow(dim, times, times * rows)


def _aligned_rows(x: torch.Tensor, rows: int, wanted: int, dim: int, axis: AxisHandle) -> torch.Tensor:
    """Return `wanted` rows of this rank between its `rows` rows and one on either side, corners of the whole image aligned. Row
    `o` of the image lies at ``o (total - 1) / (result - 1)``, between rows that this rank has; computed as the operation does."""
    exact = torch.float64 if x.dtype is torch.float64 else torch.float32
    total, result, first = rows * axis.size, wanted * axis.size, axis.coordinate * rows - 1
    scale = torch.tensor(total - 1, dtype=exact) / (result - 1)
    at = torch.arange(axis.coordinate * wanted, (axis.coordinate + 1) * wanted, device=x.device).to(exact) * scale.to(x.device)
    below = at.long().clamp_max(total - 1)
    share = (at - below).view(-1, *[1] * (x.dim() - 1 - dim))
    one, two = (x.index_select(dim, index - first).to(exact) for index in (below, (below + 1).clamp_max(total - 1)))
    return (one * (1 - share) + two * share).to(x.dtype)
