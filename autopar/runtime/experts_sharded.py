"""A mixture of experts over one mesh axis: each rank has a part of the experts, in the order of coordinates.

Owned: all tokens are here, and each rank computes its own experts' copies. Dispatched: tokens are cut, too. Each rank sends every
copy to the rank that has its expert, with its weight; there it is computed, and comes back. The numbers of copies go ahead in an
exchange of their own. The backward is the same in reverse: gradients of results go to the experts, those of tokens come back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .activations import Inside
from .apply import apply
from .axis import AxisHandle
from .compat import alias, all_to_all, all_to_all_rows, has_data, wait
from .experts import Matrices, Sorted, compute, moe_experts, scattered, sort_copies
from .load import note


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moe_experts_owned(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str,
    capacity: None = None,
    *,
    axis: AxisHandle,
) -> torch.Tensor:
    """`experts.moe_experts` with ``up[E / n, ...]`` and so on, this rank's experts: a partial sum."""
    if axis.size == 1:
        alone: torch.Tensor = moe_experts(x, experts, weights, up, down, up_bias, down_bias, activation, layout, capacity)
        return alone
    assert capacity is None, "capacity is applied before (expert_capacity)"
    number, k, width = up.shape[0], experts.shape[-1], x.shape[-1]
    ids = experts.reshape(-1) - axis.coordinate * number
    ids = torch.where((ids < 0) | (ids > number), number, ids)
    order = sort_copies(ids, number, ids.shape[0] // axis.size)
    note(axis.coordinate * number, axis.size * number, order.bounds)
    matrices = Matrices(up, down, up_bias, down_bias)
    return compute(Inside.of(activation, layout), x.reshape(-1, width), order, weights.reshape(-1), k, matrices).view(x.shape)


class _Take(torch.autograd.Function):
    """Rows of tokens for their copies; the gradient of a token is the sum of its copies'."""

    @staticmethod
    def forward(ctx: Any, k: int, x: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        ctx.k, ctx.tokens = k, x.shape[0]
        ctx.save_for_backward(copies)
        return x.index_select(0, copies // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        return None, scattered(grad, copies, ctx.tokens, ctx.k), None


class _Sum(torch.autograd.Function):
    """The sum of each token's copies; every copy gets the gradient of its token."""

    @staticmethod
    def forward(ctx: Any, k: int, tokens: int, rows: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        ctx.k = k
        ctx.save_for_backward(copies)
        return scattered(rows, copies, tokens, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        return None, None, grad.index_select(0, copies // ctx.k), None


class _Send(torch.autograd.Function):
    """Sends rows of several tensors: `send` of them to each rank, `receive` from each. Gives tokens of their shapes, which carry
    gradients, and what is on its way. In the backward the gradients arrive as tokens' gradients, still on their way."""

    @staticmethod
    def forward(ctx: Any, send: list[int], receive: list[int], group: str, *rows: torch.Tensor) -> Any:
        raw = [all_to_all_rows(each.contiguous(), receive, send, group) for each in rows]
        ctx.mark_non_differentiable(*raw)
        return *(each.new_zeros(()).expand(each.shape) for each in rows), *raw

    @staticmethod
    def backward(ctx: Any, *carriers: torch.Tensor) -> Any:
        return None, None, None, *(wait(each) for each in carriers[: len(carriers) // 2])


class _Receive(torch.autograd.Function):
    """Waits for them. In the backward it sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, send: list[int], receive: list[int], group: str, *both: torch.Tensor) -> Any:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return tuple(alias(wait(each)) for each in both[len(both) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        carriers = [all_to_all_rows(each.contiguous(), ctx.send, ctx.receive, ctx.group) for each in grads]
        return None, None, None, *carriers, *(None for _ in grads)


class Sent(NamedTuple):
    """Copies of tokens on their way to their experts. `tokens` carry gradients, `order` says which copies they are."""

    tokens: tuple[torch.Tensor, ...]
    send: list[int]
    receive: list[int]
    known: list[int]
    order: Sorted
    shape: torch.Size
    k: int
    axis: AxisHandle
    matrices: Matrices
    inside: Inside


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moe_experts_start(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str,
    capacity: None = None,
    *,
    axis: AxisHandle,
) -> Sent | torch.Tensor:
    """Sends this rank's tokens to their experts; `moe_experts_wait` gives the result."""
    if axis.size == 1:
        alone: torch.Tensor = moe_experts(x, experts, weights, up, down, up_bias, down_bias, activation, layout, capacity)
        return alone
    assert capacity is None, "capacity is applied before (expert_capacity)"
    number, k = up.shape[0], experts.shape[-1]
    order = sort_copies(experts.reshape(-1), axis.size * number)
    ends = order.bounds[number - 1 :: number]
    send = [end - start for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    counts = torch.tensor([b - a for a, b in zip((0, *order.bounds[:-1]), order.bounds, strict=True)], device=x.device)
    arriving = wait(all_to_all(counts, axis.size, axis.group_name))
    known = arriving.tolist() if has_data(arriving) else [send[0] // number] * len(order.bounds)
    receive = [sum(known[at : at + number]) for at in range(0, len(known), number)]
    rows = apply(_Take, k, x.reshape(-1, x.shape[-1]), order.copies)
    scales = apply(_Take, 1, weights.reshape(-1, 1), order.copies)
    tokens = apply(_Send, send, receive, axis.group_name, rows, scales)
    matrices = Matrices(up, down, up_bias, down_bias)
    return Sent(tokens, send, receive, known, order, x.shape, k, axis, matrices, Inside.of(activation, layout))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moe_experts_wait(sent: Sent | torch.Tensor) -> torch.Tensor:
    """What the experts make of the tokens that `moe_experts_start` sent."""
    if isinstance(sent, torch.Tensor):
        return sent
    axis, number, device = sent.axis, sent.matrices.up.shape[0], sent.tokens[0].device
    rows, scales = apply(_Receive, sent.send, sent.receive, axis.group_name, *sent.tokens)
    every = torch.arange(number, device=device).repeat(axis.size)
    ids = every.repeat_interleave(torch.tensor(sent.known, device=device), output_size=sum(sent.receive))
    mine = sort_copies(ids, number)
    note(axis.coordinate * number, axis.size * number, mine.bounds)
    made = compute(sent.inside, rows, mine, scales.reshape(-1), 1, sent.matrices)
    returning = apply(_Send, sent.receive, sent.send, axis.group_name, made)
    (back,) = apply(_Receive, sent.receive, sent.send, axis.group_name, *returning)
    result: torch.Tensor = apply(_Sum, sent.k, sent.shape[:-1].numel(), back, sent.order.copies)
    return result.view(sent.shape)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def moe_experts_dispatched(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str,
    capacity: None = None,
    *,
    axis: AxisHandle,
) -> torch.Tensor:
    """`experts.moe_experts` of this rank's tokens, with ``up[E / n, ...]`` and so on, this rank's experts.

    A dry run has no data to tell how many copies go where: equally many go to each rank.
    """
    operands = (x, experts, weights, up, down, up_bias, down_bias)
    result: torch.Tensor = moe_experts_wait(moe_experts_start(*operands, activation, layout, capacity, axis=axis))
    return result
