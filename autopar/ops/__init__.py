"""Operators that a user's model may call: plain PyTorch when run, one operation with a sharding rule when captured. `opaque`
makes one of a whole module.

`moe_experts` is a mixture of routed experts. `library` registers the operators with torch; what they compute is in `runtime.ops`,
which is imported when one is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autopar.errors import OperatorError

if TYPE_CHECKING:
    from autopar.runtime.ops.expert_activations import ExpertActivation
    from autopar.runtime.ops.experts import ExpertWeights

__all__ = ["moe_experts"]


def moe_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    layout: str = "halves",
    capacity: float | None = None,
) -> torch.Tensor:
    """A mixture of experts: of each token the sum over k of ``weights[..., k] * expert_{experts[..., k]}(x[...])``.

    Tokens ``x [..., H]``, chosen experts ``[..., K]`` (int64; the number of experts means nowhere), their weights ``[..., K]``.
    Expert e is ``down[e] @ (f(gate) * up)`` with ``gate, up`` from ``up[e] @ x``: ``up [E, 2 F, H]``, ``down [E, H, F]``, biases
    ``[E, 2 F]`` and ``[E, H]``. `layout`: ``halves`` (all gates first), ``interleaved`` (by turns), ``plain`` (no gates:
    ``up [E, F, H]``), followed by ``transposed`` for matrices ``[E, in, out]``. `activation`: ``silu``, ``gelu``,
    ``gelu_tanh``, ``relu``, ``relu2`` and others (`autopar.runtime.ops.expert_activations`).

    `capacity`: each expert takes at most ``ceil(capacity * T * K / E)`` copies of the T tokens of each group, the first in
    order; the others count nothing. Leading dimensions of `experts` ``[..., T, K]`` are groups (sequences); with ``[T, K]``
    the whole batch is one. None: all.
    """
    from autopar.runtime.ops.expert_activations import ExpertActivation
    from autopar.runtime.ops.experts import ExpertWeights

    try:
        form = ExpertActivation.of(activation, layout)
    except ValueError as error:
        raise OperatorError(f"moe_experts: {error}") from None
    _check(x, experts, weights, ExpertWeights(up, down, up_bias, down_bias), form)
    if capacity is not None:
        if not capacity > 0:
            raise OperatorError(f"moe_experts: capacity {capacity} is not above 0; pass None for no bound")
        experts = expert_capacity(experts, up.shape[0], capacity)
    if torch.compiler.is_exporting():
        from autopar.ops.library import operators

        made: torch.Tensor = operators()[0](x, experts, weights, up, down, up_bias, down_bias, activation, layout, None)
        return made
    from autopar.runtime.ops.mixtures import moe_experts as run

    result: torch.Tensor = run(x, experts, weights, up, down, up_bias, down_bias, activation=activation, layout=layout)
    return result


def expert_capacity(experts: torch.Tensor, number: int, capacity: float) -> torch.Tensor:
    """`experts` ``[..., T, K]`` with those above the capacity of an expert replaced by `number`: nowhere."""
    if torch.compiler.is_exporting():
        from autopar.ops.library import operators

        bounded: torch.Tensor = operators()[1](experts, number, capacity)
        return bounded
    from autopar.runtime.ops.experts import expert_capacity as run

    return run(experts, number, capacity)


def _check(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, matrices: ExpertWeights, form: ExpertActivation
) -> None:
    """OperatorError where arguments do not fit each other."""
    up, down, up_bias, down_bias = matrices
    layout = f"{form.gated} transposed" if form.transposed else form.gated
    if experts.is_floating_point() or experts.dtype is not torch.int64:
        raise OperatorError(f"moe_experts: experts are {experts.dtype}; pass the indices of topk, int64")
    if experts.dim() < 2 or experts.shape != weights.shape or tuple(experts.shape[:-1]) != tuple(x.shape[:-1]):
        raise OperatorError(
            f"moe_experts: x is {_shape(x)}, experts {_shape(experts)}, weights {_shape(weights)}; pass x [..., H], experts and "
            "weights [..., K]"
        )
    if up.dim() != 3 or down.dim() != 3:
        raise OperatorError(f"moe_experts: up is {_shape(up)}, down {_shape(down)}; pass one matrix for each expert, [E, ., .]")
    number, wide, hidden = up.shape if not form.transposed else (up.shape[0], up.shape[2], up.shape[1])
    inner = wide if form.gated == "plain" else wide // 2
    wanted = (number, inner, hidden) if form.transposed else (number, hidden, inner)
    if hidden != x.shape[-1] or tuple(down.shape) != wanted or (form.gated != "plain" and wide % 2):
        raise OperatorError(
            f"moe_experts: with layout {layout!r} and x {_shape(x)}, up {_shape(up)} and down {_shape(down)} do not fit; "
            f"pass {_wanted(form.gated, form.transposed)}"
        )
    if experts.shape[-1] > number:
        raise OperatorError(f"moe_experts: {experts.shape[-1]} experts of each token, but there are {number}; choose fewer")
    for name, bias, size in (("up_bias", up_bias, wide), ("down_bias", down_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (number, size):
            raise OperatorError(f"moe_experts: {name} is {_shape(bias)}, not [{number}, {size}]")


def _wanted(gated: str, transposed: bool) -> str:
    wide = "F" if gated == "plain" else "2 F"
    return f"up [E, H, {wide}] and down [E, F, H]" if transposed else f"up [E, {wide}, H] and down [E, H, F]"


def _shape(x: torch.Tensor) -> str:
    return f"[{', '.join(map(str, x.shape))}]"
