"""A mixture of experts on one rank: copies of tokens are sorted by expert, multiplied with two matrices each, and summed by
token.

No step loops over experts in Python except the products where torch has no grouped kernel. Sums are always in the same order. The
numbers of copies come to the host once a call. Without data (a dry run) every expert has equally many.

Grouped matrix products: consecutive rows, each group with its own matrix; rows ``bounds[i - 1]`` to ``bounds[i]`` belong to
matrix i.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..compat.autograd import has_data
from .expert_activations import ExpertActivation


class ExpertWeights(NamedTuple):
    """The matrices of all experts: up ``[E, F or 2 F, H]``, down ``[E, H, F]`` (transposed: the last two swapped), biases ``[E,
    .]``."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class SortedCopies(NamedTuple):
    """Copies in the order of their experts, without dropped ones: copy ``t * k + j`` is of token t. `experts`: the expert of
    each; those of expert e end at ``bounds[e]``."""

    copies: torch.Tensor
    experts: torch.Tensor
    bounds: list[int]


def sort_copies(ids: torch.Tensor, experts: int, expected: int | None = None) -> SortedCopies:
    """Sort ids ``[n]`` from 0 to `experts`; the last means dropped. Without data `expected` copies stay (None: all)."""
    values, order = ids.sort(stable=True)
    ends = torch.searchsorted(values, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    count = ids.shape[0] if expected is None else expected
    bounds = ends.tolist() if has_data(ends) else [count * (index + 1) // experts for index in range(experts)]
    return SortedCopies(order[: bounds[-1]], values[: bounds[-1]], bounds)


def sum_copies(rows: torch.Tensor, copies: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    """The sum over the k copies of each token: ``[n, H] -> [tokens, H]``. Dropped copies count as zeros."""
    if k == 1 and rows.shape[0] == tokens:
        return torch.empty_like(rows).index_copy_(0, copies, rows)
    whole = rows.new_zeros(tokens * k, rows.shape[1]).index_copy_(0, copies, rows)
    return whole.view(tokens, k, -1).sum(1)


class ComputeExperts(torch.autograd.Function):
    """The sum of the copies of each token ``[T, H]``, weighted by `weights` ``[T * k]``. Saves, beside its operands, the result
    of the first product; the backward recomputes the activation and the copies."""

    @staticmethod
    def forward(
        ctx: Any,
        inside: ExpertActivation,
        k: int,
        order: SortedCopies,
        x: torch.Tensor,
        weights: torch.Tensor,
        *matrices: torch.Tensor | None,
    ) -> torch.Tensor:
        up, down, up_bias, down_bias = matrices
        assert up is not None and down is not None
        copies, experts, bounds = order
        wide = grouped_product(x.index_select(0, copies // k), _into(up, inside), bounds)
        if up_bias is not None:
            wide += up_bias.index_select(0, experts)
        out = grouped_product(inside(wide), _into(down, inside), bounds)
        if down_bias is not None:
            out += down_bias.index_select(0, experts)
        ctx.save_for_backward(x, weights, copies, experts, wide, *matrices)
        ctx.inside, ctx.k, ctx.bounds = inside, k, bounds
        scale = weights.index_select(0, copies).unsqueeze(1)
        out = out.mul_(scale) if out.dtype == torch.promote_types(out.dtype, scale.dtype) else out * scale
        return sum_copies(out, copies, x.shape[0], k).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weights, copies, experts, wide, up, down, up_bias, down_bias = ctx.saved_tensors
        inside, bounds, tokens = ctx.inside, ctx.bounds, copies // ctx.k
        _, _, _, to_x, to_weights, to_up, to_down, to_up_bias, to_down_bias = ctx.needs_input_grad
        inner, pull = inside.with_pullback(wide)
        rows = grad.index_select(0, tokens)
        back = grouped_product(rows, _into(down, inside).transpose(1, 2), bounds)
        scale = weights.index_select(0, copies).unsqueeze(1)
        gradients: dict[str, torch.Tensor] = {}
        if to_weights:
            gained = (inner * back).sum(1, dtype=weights.dtype)
            if down_bias is not None:
                gained += (rows * down_bias.index_select(0, experts)).sum(1, dtype=weights.dtype)
            gradients["weights"] = torch.zeros_like(weights).index_copy_(0, copies, gained)
        rows.mul_(scale)
        back.mul_(scale)
        if to_down:
            left, right = (inner, rows) if inside.transposed else (rows, inner)
            gradients["down"] = grouped_outer(left, right, bounds)
        if down_bias is not None and to_down_bias:
            gradients["down_bias"] = grouped_sum(rows, experts, down.shape[0])
        left = right = rows = inner = grad  # frees what is not needed any more
        wide_grad = pull(back)
        back = grad
        if up_bias is not None and to_up_bias:
            gradients["up_bias"] = grouped_sum(wide_grad, experts, up.shape[0])
        if to_up:
            rows = x.index_select(0, tokens)
            left, right = (rows, wide_grad) if inside.transposed else (wide_grad, rows)
            gradients["up"] = grouped_outer(left, right, bounds)
        if to_x:
            left = right = grad
            rows = grouped_product(wide_grad, _into(up, inside).transpose(1, 2), bounds)
            wide_grad = grad
            gradients["x"] = sum_copies(rows, copies, x.shape[0], ctx.k)
        names = ("x", "weights", "up", "down", "up_bias", "down_bias")
        return None, None, None, *(gradients.get(name) for name in names)


def _into(matrices: torch.Tensor, inside: ExpertActivation) -> torch.Tensor:
    """Return matrices as ``[E, in, out]``."""
    return matrices if inside.transposed else matrices.transpose(1, 2)


def expert_capacity(experts: torch.Tensor, number: int, factor: float) -> torch.Tensor:
    """Return `experts` ``[..., T, K]`` where each expert takes at most ``ceil(factor * T * K / number)`` copies of each group of
    T tokens.

    The first copies in the order of tokens (and of the K choices of a token) stay, the others become `number`: dropped. Each of
    the leading dimensions is a group of its own, a sequence say (as in GShard, arXiv:2006.16668, section 2.2); without leading
    dimensions all T tokens of the batch are one group.
    """
    tokens, k = experts.shape[-2:]
    limit = ceil(factor * tokens * k / number)
    ids = experts.reshape(-1, tokens * k)
    values, order = ids.sort(dim=1, stable=True)
    every = torch.arange(number + 1, device=ids.device, dtype=ids.dtype).expand(ids.shape[0], -1).contiguous()
    starts = torch.searchsorted(values.contiguous(), every)
    place = torch.arange(tokens * k, device=ids.device) - starts.gather(1, values)
    within = torch.where(place < limit, values, number)
    return torch.empty_like(ids).scatter_(1, order, within).view(experts.shape)


_ALIGNED_BYTES = 16
_CPU = (torch.float32, torch.bfloat16, torch.float16)
_CUDA = (torch.bfloat16,)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each group: ``[n, a] x [E, a, b] -> [n, b]``."""
    count, width = rows.shape[0], matrices.shape[2]
    if count == 0 or not has_data(rows):
        return rows.new_empty(count, width)
    if _one_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=_offsets(bounds, rows))
    out = rows.new_empty(count, width)
    for (start, end), matrix in zip(_row_ranges(bounds), matrices, strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=out[start:end])
    return out


def grouped_outer(left: torch.Tensor, right: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
    """Return ``[n, a], [n, b] -> [E, a, b]``, ``left^T right`` over the rows of each matrix."""
    shape = (len(bounds), left.shape[1], right.shape[1])
    if left.shape[0] == 0:
        return left.new_zeros(shape)
    if not has_data(left):
        return left.new_empty(shape)
    if _one_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=_offsets(bounds, left))
    out = left.new_empty(shape)
    for index, (start, end) in enumerate(_row_ranges(bounds)):
        torch.mm(left[start:end].t(), right[start:end], out=out[index])
    return out


def grouped_sum(rows: torch.Tensor, matrix_of_row: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``[n, a] -> [E, a]``, the sum of each matrix's rows, always in the same order."""
    every = torch.arange(count, device=rows.device).unsqueeze(1)
    return (every == matrix_of_row).to(rows.dtype) @ rows


def _row_ranges(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((0, *bounds[:-1]), bounds, strict=True))


def _offsets(bounds: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32).to(like.device, non_blocking=True)


def _one_kernel(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes both: seen on 2.13.0; needs compute capability 8 or more, and aligned rows."""
    if left.dtype != right.dtype or left.device != right.device or not hasattr(F, "grouped_mm"):
        return False
    if left.is_cuda and (left.dtype not in _CUDA or torch.cuda.get_device_capability(left.device)[0] < 8):
        return False
    if not left.is_cuda and (left.device.type != "cpu" or left.dtype not in _CPU):
        return False
    return _aligned(left) and _aligned(right)


def _aligned(x: torch.Tensor) -> bool:
    strides = sorted(x.stride()[-2:])
    others = (*strides[1:], *x.stride()[:-2])
    return (
        strides[0] == 1
        and all(stride and stride * x.element_size() % _ALIGNED_BYTES == 0 for stride in others)
        and (x.data_ptr() % _ALIGNED_BYTES == 0)
    )
