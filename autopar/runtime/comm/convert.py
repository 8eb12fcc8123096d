"""Placement conversions (DTensor's redistribute) on one mesh axis, differentiable: the backward runs the exact dual.

A conversion is written as text, ``"S(1) -> R"``; `conversions` says what it does in the forward and in the backward. `parts` in
``S(dim,parts)`` counts the parts of the local tensor. `start` and `wait` split one conversion in two: the program computes
between them, while the collective is in flight. In the backward `wait` starts the dual collective, and `start` waits for it. All
of it traces: torch.compile sees functional collectives and no graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..compat.autograd import alias, apply
from ..device.axis import AxisHandle
from .coalesced import finish_collectives, launch_collectives, needs_gather
from .conversions import apply_locally, parse_conversion, result_shape
from .uneven import convert_uneven


class _Convert(torch.autograd.Function):
    """Converts several tensors at once, with coalesced collectives in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, texts: tuple[str, ...], size: int, coordinate: int, group: str, *xs: torch.Tensor) -> Any:
        ctx.texts, ctx.size, ctx.coordinate, ctx.group = texts, size, coordinate, group
        operations = [parse_conversion(text)[0] for text in texts]
        return tuple(finish_collectives(operations, xs, launch_collectives(operations, xs, size, group), size, coordinate))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        operations = [parse_conversion(text)[1] for text in ctx.texts]
        results = finish_collectives(
            operations, grads, launch_collectives(operations, grads, ctx.size, ctx.group), ctx.size, ctx.coordinate
        )
        return (None, None, None, None, *results)


def convert(x: torch.Tensor, axis: AxisHandle, text: str) -> torch.Tensor:
    """`x` in another placement on `axis`; on an axis of one rank, `x` itself."""
    if axis.size == 1:
        return x
    if x.is_complex():  # collectives take pairs of real numbers
        return torch.view_as_complex(convert(torch.view_as_real(x.resolve_conj()), axis, text).contiguous())
    if axis.shares:
        return convert_uneven(x, axis, text)
    (result,) = apply(_Convert, (text,), axis.size, axis.coordinate, axis.group_name, x)
    return result  # type: ignore[no-any-return]


def convert_many(xs: Sequence[torch.Tensor], axis: AxisHandle, text: str | Sequence[str]) -> tuple[torch.Tensor, ...]:
    """Several conversions, with one coalesced collective of each kind and dtype each way. `text`: one for all, or one each."""
    if axis.size == 1:
        return tuple(xs)
    texts = (text,) * len(xs) if isinstance(text, str) else tuple(text)
    if any(x.is_complex() for x in xs):
        return tuple(convert(x, axis, each) for x, each in zip(xs, texts, strict=True))
    if axis.shares:
        return tuple(convert_uneven(x, axis, each) for x, each in zip(xs, texts, strict=True))
    return apply(_Convert, texts, axis.size, axis.coordinate, axis.group_name, *xs)  # type: ignore[no-any-return]


class PendingConversion(NamedTuple):
    """A conversion in flight. `token` has the shape of the input and carries the gradient; `raw` is the collective's output."""

    token: torch.Tensor
    raw: torch.Tensor | None
    axis: AxisHandle
    text: str


class _Start(torch.autograd.Function):
    """Launches the collective. In the backward the gradient arrives in a carrier: the output of the dual collective, still in
    flight, with as many elements as the input."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, x: torch.Tensor) -> Any:
        forward, ctx.dual = parse_conversion(text)
        ctx.size, ctx.coordinate, ctx.shape = size, coordinate, result_shape(forward, x.shape, size)
        raw = (
            launch_collectives([forward], [x], size, group)[0]
            if forward.communicates
            else apply_locally(forward, x, size, coordinate)
        )
        ctx.mark_non_differentiable(raw)
        return x.new_zeros(()).expand(x.shape), raw

    @staticmethod
    def backward(ctx: Any, carrier: torch.Tensor, _: torch.Tensor) -> Any:
        if not ctx.dual.communicates:
            return None, None, None, None, carrier
        like = carrier.new_zeros(()).expand(ctx.shape)
        return None, None, None, None, finish_collectives([ctx.dual], [like], [carrier.view(-1)], ctx.size, ctx.coordinate)[0]


class _Wait(torch.autograd.Function):
    """Waits for the collective. In the backward it launches the dual of it on the gradient."""

    @staticmethod
    def forward(ctx: Any, text: str, size: int, coordinate: int, group: str, token: torch.Tensor, raw: torch.Tensor) -> Any:
        forward, ctx.dual = parse_conversion(text)
        ctx.size, ctx.coordinate, ctx.group, ctx.shape = size, coordinate, group, token.shape
        return finish_collectives([forward], [token], [raw], size, coordinate)[0] if forward.communicates else alias(raw)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.dual.communicates:
            carrier = launch_collectives([ctx.dual], [grad], ctx.size, ctx.group)[0].view(ctx.shape)
        else:
            carrier = apply_locally(ctx.dual, grad, ctx.size, ctx.coordinate)
        return None, None, None, None, carrier, None


def start(x: torch.Tensor, axis: AxisHandle, text: str) -> PendingConversion:
    """Starts a conversion; `wait` returns its result."""
    if axis.size == 1:
        return PendingConversion(x, None, axis, text)
    if axis.shares or x.is_complex() or needs_gather(parse_conversion(text)[0], x):
        return PendingConversion(convert(x, axis, text), None, axis, text)
    token, raw = apply(_Start, text, axis.size, axis.coordinate, axis.group_name, x)
    return PendingConversion(token, raw, axis, text)


def wait(pending: PendingConversion) -> torch.Tensor:
    """The result of `start`."""
    token, raw, axis, text = pending
    if raw is None:
        return token
    return apply(_Wait, text, axis.size, axis.coordinate, axis.group_name, token, raw)  # type: ignore[no-any-return]
