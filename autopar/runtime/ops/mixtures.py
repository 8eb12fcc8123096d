"""Mixtures of experts as programs call them, eager and compiled.

How many copies of tokens an expert gets is data, so that torch.compile traces nothing of `experts` and `expert_parallel`. In
compiled code each call is an operator, and so are its gradients (`compat.eager_call`). Where tokens are exchanged there are two
calls: the second takes the handle of the first, whose exchange is in flight, and the gradient of that handle has the exchange of
gradients in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.autograd import apply
from ..compat.collectives import coordinate_in
from ..compat.eager_call import call_eagerly, gradients_of
from ..device.axis import AxisHandle
from .expert_activations import ExpertActivation
from .expert_parallel import DispatchedTokens, combine_tokens, dispatch_tokens, own_experts
from .experts import ExpertWeights, expert_capacity

_WHOLE = AxisHandle("")


class SentTokens(NamedTuple):
    """Tokens in flight to their experts, in compiled code the handle of the call that sent them; and what computes them."""

    sent: DispatchedTokens | Tensor
    shape: torch.Size
    matrices: tuple[Tensor | None, ...]
    axis: AxisHandle
    activation: str
    layout: str


def moe_experts(
    x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor | None, activation: str = "silu", layout: str = "halves",
    capacity: float | None = None,
) -> Tensor:  # fmt: skip
    """The sum over k of ``weights[..., k] * expert_{experts[..., k]}(x[...])`` of each token: ``[..., H]``, ``[..., K]``, ``[...,
    K]``.

    `experts` is int64; the number of experts itself means dropped. `matrices`: see `ExpertWeights`; `capacity`: see
    `expert_capacity`.
    """
    if capacity is not None:
        experts = expert_capacity(experts, _first(matrices).shape[0], capacity)
    return moe_experts_owned(x, experts, weights, *matrices, axis=_WHOLE, activation=activation, layout=layout)


def moe_experts_owned(
    x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor | None, axis: AxisHandle, activation: str = "silu",
    layout: str = "halves",
) -> Tensor:  # fmt: skip
    """Return the partial sum of `moe_experts` over this rank's experts."""
    if torch.compiler.is_compiling():
        return _in_graph("own", (x, experts, weights, *matrices), x.shape, axis, activation, layout)[0]
    return own_experts(x, experts, weights, ExpertWeights(*matrices), ExpertActivation.of(activation, layout), axis)  # type: ignore[arg-type]


def moe_experts_start(
    x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor | None, axis: AxisHandle, activation: str = "silu",
    layout: str = "halves",
) -> SentTokens | Tensor:  # fmt: skip
    """Send this rank's tokens to their experts; `moe_experts_wait` returns the result."""
    if axis.size == 1:
        return moe_experts(x, experts, weights, *matrices, activation=activation, layout=layout)
    number = _first(matrices).shape[0]
    sent: DispatchedTokens | Tensor
    if torch.compiler.is_compiling():
        # No result but the handle: the shape of nothing says how many experts a rank has.
        sent = _in_graph("start", (x, experts, weights), torch.Size((number, 0)), axis, activation, layout)[1]
    else:
        sent = dispatch_tokens(x, experts, weights, number, axis)
    return SentTokens(sent, x.shape, matrices, axis, activation, layout)


def moe_experts_wait(sent: SentTokens | Tensor) -> Tensor:
    """Return the result of the experts for the tokens that `moe_experts_start` sent."""
    if isinstance(sent, Tensor):
        return sent
    flying, shape, matrices, axis, *form = sent
    if isinstance(flying, Tensor):
        return _in_graph("wait", (flying, *matrices), shape, axis, *form)[0]
    return combine_tokens(flying, ExpertWeights(*matrices), ExpertActivation.of(*form))  # type: ignore[arg-type]


def moe_experts_dispatched(x: Tensor, experts: Tensor, weights: Tensor, *matrices: Tensor | None, **options: Any) -> Tensor:
    """Return `moe_experts` of this rank's tokens, with the options of `moe_experts_start`.

    A dry run has no data that tells how many copies go where: equally many go to each rank.
    """
    return moe_experts_wait(moe_experts_start(x, experts, weights, *matrices, **options))


def _first(matrices: Sequence[Tensor | None]) -> Tensor:
    assert matrices[0] is not None
    return matrices[0]


# -- in compiled code


def _in_graph(
    kind: str, operands: Sequence[Tensor | None], shape: Sequence[int], axis: AxisHandle, activation: str, layout: str
) -> tuple[Tensor, Tensor]:
    """Return the result of a call, and its handle."""
    trains = torch.is_grad_enabled()
    wanted = tuple(trains and x is not None and x.requires_grad for x in operands)
    options = {
        "kind": kind, "group": axis.group_name, "size": axis.size, "activation": activation, "layout": layout,
    }  # fmt: skip
    result, handle = apply(_Call, options, tuple(shape), wanted, axis.slots, *operands)
    return result, handle


class _Call(torch.autograd.Function):
    """Saves the operands, and the handle, which has the rest. The gradient of a call that sends tokens is that of its handle."""

    @staticmethod
    def forward(
        ctx: Any, options: Any, shape: tuple[int, ...], wanted: tuple[bool, ...], slots: Tensor | None, *operands: Tensor | None
    ) -> Any:
        present = [each is not None for each in operands]
        tensors = [each for each in operands if each is not None]
        ctx.sends, ctx.wanted = options["kind"] == "start", wanted
        ctx.wanted_tensors = [want for want, there in zip(wanted, present, strict=True) if there]
        result, handle = _traced_call(tensors, present, ctx.wanted_tensors, slots, shape, **options)
        ctx.save_for_backward(handle, *tensors)
        ctx.mark_non_differentiable(result if ctx.sends else handle)
        return result, handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_handle: Tensor) -> Any:
        handle, *tensors = ctx.saved_tensors
        gradients = iter(_traced_gradients(handle, of_handle if ctx.sends else grad, tensors, ctx.wanted_tensors))
        return None, None, None, None, *(next(gradients) if want else None for want in ctx.wanted)


@torch.library.custom_op("autopar::call_experts", mutates_args=())
def _traced_call(
    tensors: Sequence[Tensor], present: Sequence[bool], wanted: Sequence[bool], slots: Tensor | None, shape: Sequence[int], *,
    kind: str, group: str, size: int, activation: str, layout: str,
) -> list[Tensor]:  # fmt: skip
    """Return the result of a call of `kind`, of this shape, and its handle. `tensors`: the operands that are `present`."""
    coordinate = coordinate_in(group) if size > 1 else 0
    axis, inside = AxisHandle("", size, coordinate, group, (), slots), ExpertActivation.of(activation, layout)
    functions: dict[str, Callable[..., Any]] = {
        "own": lambda x, experts, weights, *matrices: own_experts(x, experts, weights, ExpertWeights(*matrices), inside, axis),
        "start": lambda x, experts, weights: dispatch_tokens(x, experts, weights, shape[0], axis),
        "wait": lambda sent, *matrices: combine_tokens(sent, ExpertWeights(*matrices), inside),
    }

    def run(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return functions[kind](*(next(rest) if each else None for each in present))

    result, handle = call_eagerly(run, tensors, wanted)
    return [tensors[0].new_empty(shape) if result is None else result, handle]


@_traced_call.register_fake
def _(tensors: Sequence[Tensor], _: Any, wanted: Any, slots: Tensor | None, shape: Sequence[int], **options: Any) -> list[Tensor]:
    return [tensors[0].new_empty(shape), tensors[0].new_empty(())]


@torch.library.custom_op("autopar::experts_gradients", mutates_args=())
def _traced_gradients(handle: Tensor, grad: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of those operands of a call that are `wanted`."""
    return gradients_of(handle, grad, tensors)


@_traced_gradients.register_fake
def _(handle: Tensor, grad: Tensor, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [each.new_empty(each.shape) for each, want in zip(tensors, wanted, strict=True) if want]
