"""A mixture of experts on one rank: copies of tokens in the order of their experts, two products with a matrix each, and back.

No step loops over experts in Python but the products where torch has no grouped kernel. Sums are in one order always.
The numbers of copies come to the host once a call. Without data (a dry run) every expert has equally many.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch

from .activations import Inside
from .apply import apply
from .compat import autograd_inside, has_data
from .grouped import grouped_outer, grouped_product, grouped_sum
from .load import note


class Matrices(NamedTuple):
    """Of all experts: up ``[E, F or 2 F, H]``, down ``[E, H, F]`` (transposed: the last two swapped), biases ``[E, .]``."""

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Sorted(NamedTuple):
    """Copies in the order of their experts, without those that go nowhere: copy ``t * k + j`` is of token t. `experts` of each;
    those of expert e end at ``bounds[e]``."""

    copies: torch.Tensor
    experts: torch.Tensor
    bounds: list[int]


def sort_copies(ids: torch.Tensor, experts: int, expected: int | None = None) -> Sorted:
    """Of ids ``[n]`` from 0 to `experts`, the last of which is nowhere. Without data `expected` copies stay (None: all)."""
    values, order = ids.sort(stable=True)
    ends = torch.searchsorted(values, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    count = ids.shape[0] if expected is None else expected
    bounds = ends.tolist() if has_data(ends) else [count * (index + 1) // experts for index in range(experts)]
    return Sorted(order[: bounds[-1]], values[: bounds[-1]], bounds)


def scattered(rows: torch.Tensor, copies: torch.Tensor, tokens: int, k: int) -> torch.Tensor:
    """Sum over the k copies of each token: ``[n, H] -> [tokens, H]``. Copies that are not there count as zeros."""
    if k == 1 and rows.shape[0] == tokens:
        return torch.empty_like(rows).index_copy_(0, copies, rows)
    whole = rows.new_zeros(tokens * k, rows.shape[1]).index_copy_(0, copies, rows)
    return whole.view(tokens, k, -1).sum(1)


class _Experts(torch.autograd.Function):
    """Keeps, beside its operands, what comes out of the first product; the activation and the copies are made again."""

    @staticmethod
    def forward(
        ctx: Any, inside: Inside, k: int, order: Sorted, x: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor | None
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
        return scattered(out, copies, x.shape[0], k).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weights, copies, experts, wide, up, down, up_bias, down_bias = ctx.saved_tensors
        inside, bounds, tokens = ctx.inside, ctx.bounds, copies // ctx.k
        _, _, _, to_x, to_weights, to_up, to_down, to_up_bias, to_down_bias = ctx.needs_input_grad
        inner, pull = inside.pulled(wide)
        rows = grad.index_select(0, tokens)
        back = grouped_product(rows, _into(down, inside).transpose(1, 2), bounds)
        scale = weights.index_select(0, copies).unsqueeze(1)
        found: dict[str, torch.Tensor] = {}
        if to_weights:
            gained = (inner * back).sum(1, dtype=weights.dtype)
            if down_bias is not None:
                gained += (rows * down_bias.index_select(0, experts)).sum(1, dtype=weights.dtype)
            found["weights"] = torch.zeros_like(weights).index_copy_(0, copies, gained)
        rows.mul_(scale)
        back.mul_(scale)
        if to_down:
            left, right = (inner, rows) if inside.transposed else (rows, inner)
            found["down"] = grouped_outer(left, right, bounds)
        if down_bias is not None and to_down_bias:
            found["down_bias"] = grouped_sum(rows, experts, down.shape[0])
        left = right = rows = inner = grad  # lets go of what is not needed any more
        wide_grad = pull(back)
        back = grad
        if up_bias is not None and to_up_bias:
            found["up_bias"] = grouped_sum(wide_grad, experts, up.shape[0])
        if to_up:
            rows = x.index_select(0, tokens)
            left, right = (rows, wide_grad) if inside.transposed else (wide_grad, rows)
            found["up"] = grouped_outer(left, right, bounds)
        if to_x:
            left = right = grad
            rows = grouped_product(wide_grad, _into(up, inside).transpose(1, 2), bounds)
            wide_grad = grad
            found["x"] = scattered(rows, copies, x.shape[0], ctx.k)
        names = ("x", "weights", "up", "down", "up_bias", "down_bias")
        return None, None, None, *(found.get(name) for name in names)


def _into(matrices: torch.Tensor, inside: Inside) -> torch.Tensor:
    """``[E, in, out]``."""
    return matrices if inside.transposed else matrices.transpose(1, 2)


def compute(inside: Inside, x: torch.Tensor, order: Sorted, weights: torch.Tensor, k: int, matrices: Matrices) -> torch.Tensor:
    """``[T, H]``: of each token the weighted sum of its copies. `weights` are ``[T * k]``."""
    return apply(_Experts, inside, k, order, x, weights, *matrices)  # type: ignore[no-any-return]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moe_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    layout: str = "halves",
    capacity: float | None = None,
) -> torch.Tensor:
    """Of each token the sum of ``weights[..., k] * expert_{experts[..., k]}(x[...])``: ``[..., H]``, ``[..., K]``, ``[..., K]``.

    `experts` is int64; the number of experts itself means nowhere. `capacity`: see `expert_capacity`.
    """
    number, k, width = up.shape[0], experts.shape[-1], x.shape[-1]
    if capacity is not None:
        experts = expert_capacity(experts, number, capacity)
    order = sort_copies(experts.reshape(-1), number)
    note(0, number, order.bounds)
    matrices = Matrices(up, down, up_bias, down_bias)
    return compute(Inside.of(activation, layout), x.reshape(-1, width), order, weights.reshape(-1), k, matrices).view(x.shape)


def moe_experts_gradients(
    grad: torch.Tensor, experts: torch.Tensor, operands: tuple[torch.Tensor | None, ...], activation: str, layout: str
) -> list[torch.Tensor]:
    """Inside the kernel of an operator: the gradients of all `operands` (x, weights, up, down, biases) that are there."""
    with autograd_inside():
        given = [None if each is None else each.detach().requires_grad_() for each in operands]
        made = moe_experts(given[0], experts, *given[1:], activation, layout)
        return list(torch.autograd.grad(made, [each for each in given if each is not None], grad))


def expert_capacity(experts: torch.Tensor, number: int, factor: float) -> torch.Tensor:
    """`experts` ``[..., T, K]`` where each takes at most ``ceil(factor * T * K / number)`` copies of each group of T tokens.

    The first ones in the order of tokens (and of the K choices of a token) stay, the others become `number`: nowhere. Each of
    the leading dimensions is a group of its own, a sequence say (as in GShard, arXiv:2006.16668, section 2.2); where there are
    none, all T tokens of the batch are one group.
    """
    tokens, k = experts.shape[-2:]
    limit = ceil(factor * tokens * k / number)
    ids = experts.reshape(-1, tokens * k)
    values, order = ids.sort(dim=1, stable=True)
    every = torch.arange(number + 1, device=ids.device, dtype=ids.dtype).expand(ids.shape[0], -1).contiguous()
    starts = torch.searchsorted(values.contiguous(), every)
    place = torch.arange(tokens * k, device=ids.device) - starts.gather(1, values)
    kept = torch.where(place < limit, values, number)
    return torch.empty_like(ids).scatter_(1, order, kept).view(experts.shape)
