"""Expert parallelism: a mixture of experts over one mesh axis, where each rank has a part of the experts in the order of
coordinates.

Owned: all tokens are on every rank, and each rank computes the copies of its own experts. Dispatched: tokens are sharded, too.
Each rank sends every copy, with its weight, to the rank that has its expert; there it is computed, and sent back. The numbers of
copies are exchanged first. The backward does the same in reverse. Arguments are those of `mixtures.moe_experts`, with ``up[E / n,
...]`` and so on: this rank's experts. Capacity is applied before (`expert_capacity`). Where the axis has `slots`, experts are in
another order than their numbers (`experts.placement`): copies are sorted by slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..compat.autograd import alias, apply, has_data
from ..compat.collectives import all_to_all, all_to_all_rows, wait_tensor
from ..device.axis import AxisHandle
from .expert_activations import ExpertActivation
from .expert_load import record_copies
from .experts import ComputeExperts, ExpertWeights, SortedCopies, sort_copies, sum_copies


def own_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, own: ExpertWeights, inside: ExpertActivation, axis: AxisHandle
) -> torch.Tensor:
    """Return the partial sum of `mixtures.moe_experts` over this rank's experts; on an axis of one rank the sum."""
    number, k, width = own.up.shape[0], experts.shape[-1], x.shape[-1]
    ids = _slots(experts, axis).reshape(-1)
    if axis.size > 1:
        ids = ids - axis.coordinate * number
        ids = torch.where((ids < 0) | (ids > number), number, ids)
    order = sort_copies(ids, number, ids.shape[0] // axis.size)
    record_copies(axis.coordinate * number, axis.size * number, order.bounds, axis.slots)
    result: torch.Tensor = apply(ComputeExperts, inside, k, order, x.reshape(-1, width), weights.reshape(-1), *own)
    return result.view(x.shape)


def _slots(experts: torch.Tensor, axis: AxisHandle) -> torch.Tensor:
    return experts if axis.slots is None else axis.slots[experts]


class _Take(torch.autograd.Function):
    """The rows of tokens for their copies; the gradient of a token is the sum of its copies' gradients."""

    @staticmethod
    def forward(ctx: Any, k: int, x: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        ctx.k, ctx.tokens = k, x.shape[0]
        ctx.save_for_backward(copies)
        return x.index_select(0, copies // k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        return None, sum_copies(grad, copies, ctx.tokens, ctx.k), None


class _Sum(torch.autograd.Function):
    """The sum of the copies of each token; every copy gets the gradient of its token."""

    @staticmethod
    def forward(ctx: Any, k: int, tokens: int, rows: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        ctx.k = k
        ctx.save_for_backward(copies)
        return sum_copies(rows, copies, tokens, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (copies,) = ctx.saved_tensors
        return None, None, grad.index_select(0, copies // ctx.k), None


class _Send(torch.autograd.Function):
    """Starts the exchange of rows of several tensors: `send` of them to each rank, `receive` from each. Returns tokens of their
    shapes, which carry gradients, and the outputs in flight. In the backward the gradients arrive as the gradients of the tokens,
    still in flight."""

    @staticmethod
    def forward(ctx: Any, send: list[int], receive: list[int], group: str, *rows: torch.Tensor) -> Any:
        raw = [all_to_all_rows(each.contiguous(), receive, send, group) for each in rows]
        ctx.mark_non_differentiable(*raw)
        return *(each.new_zeros(()).expand(each.shape) for each in rows), *raw

    @staticmethod
    def backward(ctx: Any, *carriers: torch.Tensor) -> Any:
        return None, None, None, *(wait_tensor(each) for each in carriers[: len(carriers) // 2])


class _Receive(torch.autograd.Function):
    """Waits for the exchange. In the backward it sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, send: list[int], receive: list[int], group: str, *both: torch.Tensor) -> Any:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return tuple(alias(wait_tensor(each)) for each in both[len(both) // 2 :])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        carriers = [all_to_all_rows(each.contiguous(), ctx.send, ctx.receive, ctx.group) for each in grads]
        return None, None, None, *carriers, *(None for _ in grads)


class DispatchedTokens(NamedTuple):
    """Copies of tokens in flight to their experts, of which each rank has `number`. `tokens` carry gradients; `order` says which
    copies they are, `arrivals` how many came from each rank for each expert here."""

    tokens: tuple[torch.Tensor, ...]
    send: list[int]
    receive: list[int]
    arrivals: list[int]
    order: SortedCopies
    shape: torch.Size
    k: int
    number: int
    axis: AxisHandle


def dispatch_tokens(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, number: int, axis: AxisHandle
) -> DispatchedTokens:
    """Send this rank's tokens to their experts, of which each rank has `number`; `combine_tokens` returns the result."""
    k = experts.shape[-1]
    order = sort_copies(_slots(experts, axis).reshape(-1), axis.size * number)
    ends = order.bounds[number - 1 :: number]
    send = [end - start for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    counts = torch.tensor([b - a for a, b in zip((0, *order.bounds[:-1]), order.bounds, strict=True)], device=x.device)
    arriving = wait_tensor(all_to_all(counts, axis.size, axis.group_name))
    arrivals = arriving.tolist() if has_data(arriving) else [send[0] // number] * len(order.bounds)
    receive = [sum(arrivals[at : at + number]) for at in range(0, len(arrivals), number)]
    rows = apply(_Take, k, x.reshape(-1, x.shape[-1]), order.copies)
    scales = apply(_Take, 1, weights.reshape(-1, 1), order.copies)
    tokens = apply(_Send, send, receive, axis.group_name, rows, scales)
    return DispatchedTokens(tokens, send, receive, arrivals, order, x.shape, k, number, axis)


def combine_tokens(sent: DispatchedTokens, own: ExpertWeights, inside: ExpertActivation) -> torch.Tensor:
    """Return the result of the experts for the tokens that `dispatch_tokens` sent."""
    axis, number, device = sent.axis, sent.number, sent.tokens[0].device
    rows, scales = apply(_Receive, sent.send, sent.receive, axis.group_name, *sent.tokens)
    every = torch.arange(number, device=device).repeat(axis.size)
    ids = every.repeat_interleave(torch.tensor(sent.arrivals, device=device), output_size=sum(sent.receive))
    order = sort_copies(ids, number)
    record_copies(axis.coordinate * number, axis.size * number, order.bounds, axis.slots)
    results = apply(ComputeExperts, inside, 1, order, rows, scales.reshape(-1), *own)
    returning = apply(_Send, sent.receive, sent.send, axis.group_name, results)
    (back,) = apply(_Receive, sent.receive, sent.send, axis.group_name, *returning)
    result: torch.Tensor = apply(_Sum, sent.k, sent.shape[:-1].numel(), back, sent.order.copies)
    return result.view(sent.shape)
