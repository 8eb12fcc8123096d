"""The activation of an expert, between its two products, by name.

A plain expert applies a function, ``silu``. A gated one multiplies: ``silu(gate) * up``. Names with numbers, for gated experts
only:

* ``swiglu_clamped(a,l)``: ``g * sigmoid(a * g) * (clamp(up, -l, l) + 1)`` with ``g = min(gate, l)``
* ``silu_clamped(l)``: ``silu(min(gate, l)) * clamp(up, -l, l)``
* ``silu_capped(l)``: ``min(silu(gate), l) * clamp(up, -l, l)``; these two with any function in the place of ``silu``
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

Function = Callable[[torch.Tensor], torch.Tensor]
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "identity": lambda x: x,
}
"""The activations of one argument."""
_TEXT = re.compile(r"(\w+?)(?:_(clamped|capped))?(?:\(([^()]*)\))?")


def _swiglu_clamped(scale: float, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(scale * gate) * (up.clamp(-limit, limit) + 1)


def gate_of(activation: str) -> Gate:
    """The function of gate and up. ValueError where `activation` names none."""
    name, kind, numbers = _parsed(activation)
    if (name, kind) == ("swiglu", "clamped"):
        return partial(_swiglu_clamped, numbers[0], numbers[1])
    function = FUNCTIONS[name]
    if kind == "clamped":
        return lambda gate, up: function(gate.clamp(max=numbers[0])) * up.clamp(-numbers[0], numbers[0])
    if kind == "capped":
        return lambda gate, up: function(gate).clamp(max=numbers[0]) * up.clamp(-numbers[0], numbers[0])
    return lambda gate, up: function(gate) * up


def _parsed(activation: str) -> tuple[str, str, tuple[float, ...]]:
    match = _TEXT.fullmatch(activation.replace(" ", ""))
    name, kind, inner = match.groups(default="") if match is not None else ("", "", "")
    try:
        numbers = tuple(map(float, inner.split(","))) if inner else ()
    except ValueError:
        name = ""
    wanted = 2 if name == "swiglu" else 1 if kind else 0
    exists = name in FUNCTIONS or (name, kind) == ("swiglu", "clamped")
    if not exists or len(numbers) != wanted:
        raise ValueError(
            f"unknown activation {activation!r}; known are {', '.join(FUNCTIONS)}, with gates also swiglu_clamped(a,l), "
            "and any of them as silu_clamped(l), silu_capped(l)"
        )
    return name, kind, numbers


@dataclass(frozen=True)
class ExpertActivation:
    """The activation of an expert, and the layout of its matrices.

    `gated`: ``halves`` (first all gates, then all ups), ``interleaved`` (alternating) or ``plain`` (no gates).
    `transposed`: matrices are ``[in, out]``.
    """

    activation: str
    gated: str
    transposed: bool

    @staticmethod
    def of(activation: str = "silu", layout: str = "halves") -> ExpertActivation:
        """Parse a layout such as ``interleaved transposed``. ValueError where either is unknown."""
        words = layout.split()
        gated = [word for word in words if word != "transposed"] or ["halves"]
        if len(gated) > 1 or gated[0] not in ("halves", "interleaved", "plain") or words.count("transposed") > 1:
            raise ValueError(f"unknown layout {layout!r}; write halves, interleaved or plain, and transposed after it or not")
        if gated[0] == "plain" and activation not in FUNCTIONS:
            raise ValueError(f"unknown activation {activation!r} of an expert without gates; known are {', '.join(FUNCTIONS)}")
        gate_of(activation)
        return ExpertActivation(activation, gated[0], "transposed" in words)

    def __call__(self, wide: torch.Tensor) -> torch.Tensor:
        """Apply the activation ``[n, 2 F] -> [n, F]``, or ``[n, F] -> [n, F]``."""
        if self.gated == "plain":
            return FUNCTIONS[self.activation](wide)
        gate, up = wide.chunk(2, -1) if self.gated == "halves" else (wide[..., ::2], wide[..., 1::2])
        return gate_of(self.activation)(gate, up)

    def with_pullback(self, wide: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The result, and the function from its gradient to that of `wide` (a vector-Jacobian product)."""
        with torch.enable_grad():
            leaf = wide.detach().requires_grad_()
            result = self(leaf)
        node = get_gradient_edge(result)  # the graph, without the result itself
        return result.detach(), lambda grad: torch.autograd.grad(node, leaf, grad)[0]
