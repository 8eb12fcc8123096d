"""Conversions between placements, differentiable: every forward collective carries its exact dual for the backward.

A conversion is written as text, ``"S(1) -> R"``, and changes one mesh axis. `parts` in ``S(dim,parts)`` are local numbers.
`start` and `wait` split one in two: between them the program computes; in the backward `wait` starts the dual and `start` waits.
All of it traces: torch.compile sees functional collectives and no graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .apply import apply
from .attention import attention, attention_heads, attention_rows
from .attention_ring import attention_ring
from .axis import AxisHandle
from .buckets import land, launch, needs_detour
from .compat import alias
from .experts import expert_capacity, moe_experts
from .experts_sharded import moe_experts_dispatched, moe_experts_owned, moe_experts_start, moe_experts_wait
from .functions import count_valid, cross_entropy_sharded, cross_entropy_sum, embedding_sharded, histogram, linear_kn, local_mean
from .moves import local_move, parse, result_shape
from .rng import attention_dropout, dropout, random

__all__ = [
    "Pending",
    "attention",
    "attention_dropout",
    "attention_heads",
    "attention_ring",
    "attention_rows",
    "convert",
    "convert_many",
    "count_valid",
    "cross_entropy_sharded",
    "cross_entropy_sum",
    "dropout",
    "embedding_sharded",
    "expert_capacity",
    "histogram",
    "linear_kn",
    "local_mean",
    "moe_experts",
    "moe_experts_dispatched",
    "moe_experts_owned",
    "moe_experts_start",
    "moe_experts_wait",
    "random",
    "start",
    "wait",
]


class _Convert(torch.autograd.Function):
    """All moves at once, forward and backward."""

    @staticmethod
    def forward(ctx: Any, texts: tuple[str, ...], size: int, coordinate: int, group: str, *xs: torch.Tensor) -> Any:
        ctx.texts, ctx.size, ctx.coordinate, ctx.group = texts, size, coordinate, group
        moves = [parse(text)[0] for text in texts]
        return tuple(land(moves, xs, launch(moves, xs, size, group), size, coordinate))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        moves = [parse(text)[1] for text in ctx.texts]
        results = land(moves, grads, launch(moves, grads, ctx.size, ctx.group), ctx.size, ctx.coordinate)
        return (None, None, None, None, *results)


def convert(x: torch.Tensor, axis: AxisHandle, text: str) -> torch.Tensor:
    """`x` in another placement on `axis`. On an axis of one rank, `x` itself."""
    if axis.size == 1:
        return x
    (result,) = apply(_Convert, (text,), axis.size, axis.coordinate, axis.group_name, x)
    return result  # type: ignore[no-any-return]


def convert_many(xs: Sequence[torch.Tensor], axis: AxisHandle, text: str | Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Several conversions with one flat collective each way (one per dtype). `text` is shared, or one for each tensor."""
    if axis.size == 1:
        return tuple(xs)
    texts = (text,) * len(xs) if isinstance(text, str) else tuple(text)
    return apply(_Convert, texts, axis.size, axis.coordinate, axis.group_name, *xs)  # type: ignore[no-any-return]


class Pending(NamedTuple):
    """A conversion on its way. `token` has the shape of the input and carries the gradient; `raw` is what arrives."""

    token: torch.Tensor
    raw: torch.Tensor | None
    axis: AxisHandle
    text: str


class _Start(torch.autograd.Function):
    """Sends. In the backward the gradient arrives in a carrier, still on its way, with the elements of the input in any order."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, x: torch.Tensor) -> Any:
        forward, ctx.move = parse(text)
        ctx.size, ctx.coordinate, ctx.shape = size, coordinate, result_shape(forward, x.shape, size)
        raw = launch([forward], [x], size, group)[0] if forward.communicates else local_move(forward, x, size, coordinate)
        ctx.mark_non_differentiable(raw)
        return x.new_zeros(()).expand(x.shape), raw

    @staticmethod
    def backward(ctx: Any, carrier: torch.Tensor, _: torch.Tensor) -> Any:
        if not ctx.move.communicates:
            return None, None, None, None, carrier
        like = carrier.new_zeros(()).expand(ctx.shape)
        return None, None, None, None, land([ctx.move], [like], [carrier.view(-1)], ctx.size, ctx.coordinate)[0]


class _Wait(torch.autograd.Function):
    """Receives. In the backward it sends the gradient by the dual move."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, token: torch.Tensor, raw: torch.Tensor) -> Any:
        forward, ctx.move = parse(text)
        ctx.size, ctx.coordinate, ctx.group, ctx.shape = size, coordinate, group, token.shape
        return land([forward], [token], [raw], size, coordinate)[0] if forward.communicates else alias(raw)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.move.communicates:
            carrier = launch([ctx.move], [grad], ctx.size, ctx.group)[0].view(ctx.shape)
        else:
            carrier = local_move(ctx.move, grad, ctx.size, ctx.coordinate)
        return None, None, None, None, carrier, None


def start(x: torch.Tensor, axis: AxisHandle, text: str) -> Pending:
    """Begins a conversion; `wait` gives its result."""
    if axis.size == 1:
        return Pending(x, None, axis, text)
    if needs_detour(parse(text)[0], x):
        return Pending(convert(x, axis, text), None, axis, text)
    token, raw = apply(_Start, text, axis.size, axis.coordinate, axis.group_name, x)
    return Pending(token, raw, axis, text)


def wait(pending: Pending) -> torch.Tensor:
    """The result of `start`."""
    token, raw, axis, text = pending
    if raw is None:
        return token
    return apply(_Wait, text, axis.size, axis.coordinate, axis.group_name, token, raw)  # type: ignore[no-any-return]
