"""The operators as torch sees them while tracing: ``ap::moe_experts`` and ``ap::expert_capacity``, registered at first use."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

Operator = Any


@lru_cache(maxsize=1)
def operators() -> tuple[Operator, Operator]:
    """``moe_experts``, whose backward recomputes the forward, and ``expert_capacity``. Signatures are flat, as torch.library
    wants."""
    from autopar.runtime.compat.autograd import autograd_in_kernel
    from autopar.runtime.ops import experts as on_one_rank
    from autopar.runtime.ops import mixtures as runtime

    @torch.library.custom_op("ap::moe_experts", mutates_args=())
    def moe_experts(
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: str,
        layout: str,
        capacity: float | None,
    ) -> torch.Tensor:
        operands = (x, experts, weights, up, down, up_bias, down_bias)
        made: torch.Tensor = runtime.moe_experts(*operands, activation=activation, layout=layout, capacity=capacity)
        return made

    @moe_experts.register_fake
    def _(x: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty_like(x)

    @torch.library.custom_op("ap::moe_experts_backward", mutates_args=())
    def backward(
        grad: torch.Tensor,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: str,
        layout: str,
        capacity: float | None,
    ) -> list[torch.Tensor]:
        operands = (x, weights, up, down, up_bias, down_bias)
        with autograd_in_kernel():
            leaves = [None if each is None else each.detach().requires_grad_() for each in operands]
            result = runtime.moe_experts(leaves[0], experts, *leaves[1:], activation=activation, layout=layout)  # type: ignore[arg-type]
            return list(torch.autograd.grad(result, [each for each in leaves if each is not None], grad))

    @backward.register_fake
    def _(grad: torch.Tensor, x: torch.Tensor, experts: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        return [torch.empty_like(each) for each in (x, *rest[:5]) if each is not None]

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:7])
        ctx.rest = inputs[7:]

    def pull_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, experts, *others = ctx.saved_tensors
        found = iter(backward(grad, x, experts, *others, *ctx.rest))
        gradients = [None if each is None else next(found) for each in (x, *others)]
        return gradients[0], None, *gradients[1:], None, None, None

    moe_experts.register_autograd(pull_back, setup_context=save)

    @torch.library.custom_op("ap::expert_capacity", mutates_args=())
    def expert_capacity(experts: torch.Tensor, number: int, factor: float) -> torch.Tensor:
        return on_one_rank.expert_capacity(experts, number, factor)

    @expert_capacity.register_fake
    def _(experts: torch.Tensor, number: int, factor: float) -> torch.Tensor:
        return torch.empty_like(experts)

    return moe_experts, expert_capacity
