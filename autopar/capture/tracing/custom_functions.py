"""Custom ``autograd.Function``s in a captured model: their forward and their backward become ordinary operations of the graph.

A backward ``b`` is linear in the gradient g of the result: ``b(g) = J^T g`` for a J that need not be the forward's derivative
(gradient reversal, straight-through estimators). The operations of ``t = J x`` are those of ``d <b(g), x> / d g``, which autograd
writes while the forward is traced. Then ``y + t - detach(t)``, with y and all that J is made of detached, has the value of the
forward and the gradient ``J^T``. A backward that is not linear reads g itself, and is refused (`check_linear`).
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.capture.tracing.derivatives import torch_grad
from autopar.errors import CaptureError

SEED = "autopar_capture.gradient_seed"
"""The operation that stands for the gradient g while a backward is traced."""


@lru_cache(maxsize=1)
def _seed_operator() -> tuple[Any, Any]:
    library = torch.library.Library("autopar_capture", "FRAGMENT")
    library.define("gradient_seed(Tensor x, str name) -> Tensor")
    library.impl("gradient_seed", lambda x, name: torch.empty_like(x), "Meta")
    library.impl("gradient_seed", torch.library.fallthrough_kernel, "Autograd")
    return torch.ops.autopar_capture.gradient_seed.default, library


class _Context:
    """The ``ctx`` of a function."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad, self.plain = needs, set[int]()
        self.saved_tensors: tuple[Any, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.plain |= {id(tensor) for tensor in tensors}

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise CaptureError("writes into its arguments")


def apply_traced(cls: Any, where: str, args: tuple[Any, ...]) -> Any:
    """Return the result of ``cls.apply(*args)``, with its gradients, while a model is traced. CaptureError where its backward
    cannot be written as operations."""
    try:
        return _applied(cls, where, args)
    except CaptureError as error:
        text = str(error)
        if text.startswith(where):
            raise
        raise CaptureError(
            f"{where}: custom autograd.Function {cls.__qualname__} {text}; "
            "make it a torch.library custom op and give it a rule with autopar.register_rule"
        ) from None


def _applied(cls: Any, where: str, args: tuple[Any, ...]) -> Any:
    needs = tuple(isinstance(arg, Tensor) and arg.requires_grad and torch.is_grad_enabled() for arg in args)
    context = _Context(needs)
    held = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
    with torch.no_grad():
        if cls.setup_context is torch.autograd.Function.setup_context:
            result = cls.forward(context, *held)
        else:
            result = cls.forward(*held)
            cls.setup_context(context, held, result)
    if not any(needs):
        return result
    results = result if isinstance(result, tuple) else (result,)
    flows = [isinstance(y, Tensor) and y.is_floating_point() and id(y) not in context.plain for y in results]
    seed, _ = _seed_operator()
    name = f"{where} {cls.__qualname__}"
    with torch.enable_grad():
        seeds = [seed(y.detach(), name).requires_grad_() if flow else None for y, flow in zip(results, flows, strict=True)]
        given = [
            torch.zeros_like(y) if g is None and context.materializes and isinstance(y, Tensor) else g
            for g, y in zip(seeds, results, strict=True)
        ]
        found = inspect.unwrap(cls.backward)(context, *given)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [(gx, x) for gx, x, need in zip(found, args, needs, strict=False) if need and gx is not None]
        if any(not gx.requires_grad for gx, _ in pairs):
            raise CaptureError("has a backward that autograd cannot look into")
        out = []
        for y, g in zip(results, seeds, strict=True):
            total = None
            if g is not None and pairs:
                (total,) = torch_grad(
                    [gx for gx, _ in pairs], [g], [x.to(gx.dtype) for gx, x in pairs], create_graph=True, allow_unused=True
                )
            out.append(y if total is None else y + (total - total.detach()))
    return tuple(out) if isinstance(result, tuple) else out[0]


def check_linear(names: list[str]) -> None:
    """CaptureError for the first of the seeds that are left in a graph: a backward reads the gradient in another way than
    linearly."""
    for name in names:
        where, _, function = name.rpartition(" ")
        raise CaptureError(
            f"{where}: custom autograd.Function {function} has a backward that is not linear in the gradient (it clips or "
            "scales by it); make it a torch.library custom op and give it a rule with autopar.register_rule"
        )
