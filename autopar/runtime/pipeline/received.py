"""A tensor that a model chunk receives: its gradient is kept for the stage before, the tensor itself only as long as something
saves it for the backward (a leaf of autograd would hold it for every micro-batch in flight)."""

from __future__ import annotations

from typing import Any

import torch

from ..compat.autograd import alias, apply


class InputGradient:
    """The gradient of one received tensor, None until the backward reaches it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: InputGradient, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return alias(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (ctx.gradient.value,) = grads
        return None, None, None


def received_tensor(x: torch.Tensor, gradient: InputGradient) -> torch.Tensor:
    """`x` as the start of a graph, whose gradient goes to `gradient`."""
    start = torch.empty(0, device=x.device, requires_grad=True)  # what makes the result require one
    result: torch.Tensor = apply(_Received, gradient, x.detach(), start)
    return result
