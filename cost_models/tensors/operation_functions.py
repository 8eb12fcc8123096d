"""Functions by the names of autopar's operations, in which torch observes what autograd saves: those of the runtime, and of other
software whose published runs are priced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autopar.runtime.ops.functions import linear_kn as linear_kn
from autopar.runtime.ops.functions import local_mean as local_mean
from autopar.runtime.ops.functions import rotary_embedding as rotary_embedding
from autopar.runtime.ops.losses import cross_entropy_sum as cross_entropy_sum
from autopar.runtime.ops.losses import token_log_probs as token_log_probs

linear_float8_dynamic = F.linear
"""torchao's saves the operands as they come, and casts once more in the backward."""


class _Float8Product(torch.autograd.Function):
    """``x @ w.T`` in float8 as Transformer Engine saves it: a float8 copy of x, and the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), weight)
        ctx.dtype, ctx.has_bias = x.dtype, bias is not None
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        bias = gradient.new_empty(gradient.shape[-1:]) if ctx.has_bias else None
        return gradient.new_empty(x.shape), gradient.new_empty(weight.shape), bias


def linear_float8(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, recompute_cast: bool = False
) -> torch.Tensor:
    """Transformer Engine's product. `recompute_cast`: x itself is saved, and cast once more in the backward (as under selective
    checkpointing, which recomputes casts)."""
    if recompute_cast:
        return F.linear(x, weight, bias)
    return _Float8Product.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropyInPlace(torch.autograd.Function):
    """Megatron-LM's: the float32 copy of the logits becomes the softmax, which is saved, and in the backward the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits.to(torch.float32, copy=True), target)
        ctx.dtype = logits.dtype
        return torch.empty((), dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        softmax, _ = ctx.saved_tensors
        return softmax.to(ctx.dtype, copy=True), None


def cross_entropy_in_place(logits: torch.Tensor, target: torch.Tensor, *_: Any) -> torch.Tensor:
    """Megatron-LM's loss."""
    return _CrossEntropyInPlace.apply(logits, target)  # type: ignore[no-any-return, no-untyped-call]


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """Drop out as CUDA does: a mask of one byte per element, not of x's dtype."""
    return torch.ops.aten.native_dropout(x, p, True)[0]  # type: ignore[no-any-return]
