"""Captures the mixtures of experts of Hugging Face models as one operation, ``ap.moe_experts``, through transformers' interface.

Classes of experts that ``transformers.integrations.moe.use_experts_implementation`` decorates run what their configuration names;
while the copy of a model is traced, that is the function here. How the matrices lie they say themselves; what is between the two
products is found by trying it on numbers. Nothing of the user's model changes, and nothing stays registered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.ops import moe_experts
from autopar.runtime.ops.expert_activations import FUNCTIONS, ExpertActivation

NAME = "autopar"
_SAYS = ("has_gate", "has_bias", "is_transposed", "_is_expert_parallel", "num_experts")
"""Attributes that the decorator, and every class that it decorates, set."""


@contextmanager
def experts_as_operator(model: nn.Module) -> Iterator[None]:
    """While active, the experts of `model` (a copy) are calls of the operator."""
    found = {path: module for path, module in model.named_modules() if all(hasattr(module, name) for name in _SAYS)}
    interface: Any = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    if not found or interface is None:
        yield
        return
    known: dict[object, tuple[str, str]] = {}
    inside = {id(module): _describe(module, path, known) for path, module in found.items()}

    def run(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activation, layout = inside[id(module)]
        first = "gate_up_proj" if module.has_gate else "up_proj"
        biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else ()
        matrices = (getattr(module, first), module.down_proj, *biases)
        return moe_experts(hidden, index, weights, *matrices, activation=activation, layout=layout)

    configurations: dict[int, Any] = {id(module.config): module.config for module in found.values()}
    before = {key: each._experts_implementation for key, each in configurations.items()}
    interface[NAME] = run
    try:
        for each in configurations.values():
            each._experts_implementation_internal = NAME
        yield
    finally:
        del interface[NAME]
        for key, each in configurations.items():
            each._experts_implementation_internal = before[key]


def _describe(module: Any, path: str, known: dict[object, tuple[str, str]]) -> tuple[str, str]:
    """Activation and layout. CaptureError where the experts compute something else."""
    where = f"module {path} ({type(module).__name__})"
    if getattr(module, "has_post_expert_norm", False) or module._is_expert_parallel:
        what = "are sharded by transformers already" if module._is_expert_parallel else "have a norm after the second product"
        raise CaptureError(f"{where}: its experts {what}, which autopar.ops.moe_experts has not; leave that out")
    function = getattr(module, "act_fn", None)
    numbers = tuple(float(x) for x in vars(module).values() if isinstance(x, float))
    key = type(module), repr(function), numbers, module.has_gate, module.is_transposed
    if key not in known:
        try:
            found = _gated(module._apply_gate, numbers) if module.has_gate else _plain(function)
        except Exception:  # noqa: BLE001  a gate that needs more than its argument
            found = None
        if found is None:
            raise CaptureError(
                f"{where}: the activation of its experts is none that autopar knows; "
                "call autopar.ops.moe_experts with a known one, or write the experts as dense products with masks"
            )
        known[key] = found[0], found[1] + " transposed" * module.is_transposed
    return known[key]


def _probe(width: int) -> torch.Tensor:
    """Numbers of all sizes and both signs, always the same."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 2, 256, dtype=torch.float64)
    return torch.randn(256, width, generator=generator, dtype=torch.float64) * sizes[:, None]


def _gated(gate: Callable[[torch.Tensor], torch.Tensor], numbers: tuple[float, ...]) -> tuple[str, str] | None:
    """Return the activation that computes the same, to the last digits."""
    wide = _probe(8)
    expected = gate(wide)
    texts = [*FUNCTIONS]
    texts += [f"{name}_{kind}({limit})" for name in FUNCTIONS for kind in ("clamped", "capped") for limit in numbers]
    texts += [f"swiglu_clamped({a},{limit})" for a in numbers for limit in numbers]
    for layout in ("halves", "interleaved"):
        for text in texts:
            if _same(ExpertActivation.of(text, layout)(wide), expected):
                return text, layout
    return None


def _plain(function: Any) -> tuple[str, str] | None:
    x = _probe(4)
    expected = function(x)
    return next(((name, "plain") for name, each in FUNCTIONS.items() if _same(each(x), expected)), None)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=1e-12, atol=1e-12))
