"""Terms of the parameters that a script adds to the loss (L2 and L1 penalties): DTensors, so the sum is one, and so is its
gradient, which the program takes as an ordinary tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat.autograd import apply
from ..compat.dtensor import whole
from ..errors import RuntimeProblem


def with_plain_gradient(loss: torch.Tensor, stages: int) -> torch.Tensor:
    """`loss`, whose gradient may come as a DTensor. RuntimeProblem in the backward where it does on one of several pipeline
    `stages`: each has added the term of its own parameters only."""
    return apply(_PlainGradient, loss, stages)  # type: ignore[no-any-return]


class _PlainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, stages: int) -> torch.Tensor:
        ctx.stages = stages
        return loss.clone()  # autograd allows no ``loss /= steps`` on what a Function returns as a view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not isinstance(grad, DTensor):
            return grad, None
        if ctx.stages > 1:
            raise RuntimeProblem(
                "a term of the parameters in the loss (a penalty), of which a stage of a pipeline has only its own: take the "
                'weight_decay of the optimizer, or plan without a pipeline (force="pp=1")'
            )
        return whole(grad).to_local(), None


def explain_penalty(error: Exception) -> RuntimeProblem | None:
    """Return DTensor's error for a term of the parameters in a loss outside of the program, with its remedy."""
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    return RuntimeProblem(
        "a term of the parameters in a loss outside of the program (a penalty) is a DTensor, whose gradient ordinary tensors do "
        "not take: add term.full_tensor()"
    )
