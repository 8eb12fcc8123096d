"""Custom ``autograd.Function``s in a captured model: their forward and their backward become ordinary operations of the graph.

A backward ``b`` is linear in the gradient g of the result: ``b(g) = J^T g`` for a J that need not be the forward's derivative
(gradient reversal, straight-through estimators). The operations of ``t = J x`` are those of ``d <b(g), x> / d g``, which autograd
writes while the forward is traced (`backward_mode`). Then ``y + t - detach(t)``, with y and all that J is made of detached, has
the value of the forward and the gradient ``J^T``. What b does to g is part of the program until it is known to be linear
(`linear`): ``b(g) = g + c`` and ``b(g) = sign(g)`` have derivatives that say nothing of it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.capture.tracing.custom.backward_mode import BackwardMode, in_backward, modes_are_those_of
from autopar.capture.tracing.derivatives import DERIVES, torch_grad
from autopar.errors import CaptureError

SEED = "autopar_capture.gradient_seed"
"""The operation that stands for the gradient g while a backward is traced."""
MARK = "autopar_capture.with_gradients"
"""The operation that gives y, and keeps what a backward gives for it in the program."""

NONLINEAR = "has a backward that is not linear in the gradient"
ADDS = "has a backward that gives what does not come from the gradient of its result (a penalty, weight decay)"
HIDDEN = "has a backward whose derivative export loses (norm, linear or einsum of the gradient)"
_REMEDIES = {
    ADDS: "write the term that has this gradient into the loss",
    DERIVES: "call the function itself, since the plan says what is recomputed, or torch.utils.checkpoint",
}


@lru_cache(maxsize=1)
def _operators() -> tuple[Any, Any, Any]:
    library = torch.library.Library("autopar_capture", "FRAGMENT")
    library.define("gradient_seed(Tensor x, str name) -> Tensor")
    library.define("with_gradients(Tensor x, Tensor[] gradients, str name) -> Tensor")
    for name in ("gradient_seed", "with_gradients"):
        library.impl(name, lambda x, *_: torch.empty_like(x), "Meta")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    own = torch.ops.autopar_capture
    return own.gradient_seed.default, own.with_gradients.default, library


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
        raise refusal(f"{where} {cls.__qualname__}", text) from None


def refusal(name: str, what: str) -> CaptureError:
    """The line for a function (its place and name) that cannot be captured."""
    where, _, function = name.rpartition(" ")
    remedy = _REMEDIES.get(what, "make it a torch.library custom op and give it a rule with autopar.register_rule")
    return CaptureError(f"{where}: custom autograd.Function {function} {what}; {remedy}")


def _applied(cls: Any, where: str, args: tuple[Any, ...]) -> Any:
    records = torch.is_grad_enabled() and not in_backward()
    context = _Context(tuple(isinstance(arg, Tensor) and arg.requires_grad and records for arg in args))
    held = tuple(map(_data, args))
    with torch.no_grad():
        result = _forward(cls, context, held)
    results = result if isinstance(result, tuple) else (result,)
    plain = [y.detach() if isinstance(y, Tensor) and y.requires_grad else y for y in results]  # a result may be an argument
    if any(context.needs_input_grad):
        if any(isinstance(y, Tensor) and y.is_complex() and id(y) not in context.plain for y in results):
            raise CaptureError("gives complex numbers with gradients")
        flows = [isinstance(y, Tensor) and y.is_floating_point() and id(y) not in context.plain for y in results]
        plain = _with_gradients(cls, f"{where} {cls.__qualname__}", context, args, plain, flows)
    return tuple(plain) if isinstance(result, tuple) else plain[0]


def _data(arg: Any) -> Any:
    """An argument without its past, that says whether it requires a gradient."""
    return arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg


def _forward(cls: Any, context: _Context, args: tuple[Any, ...]) -> Any:
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(context, *args)
    result = cls.forward(*args)
    cls.setup_context(context, args, result)
    return result


@torch.enable_grad()
def _with_gradients(
    cls: Any, name: str, context: _Context, args: tuple[Any, ...], results: list[Any], flows: list[bool]
) -> list[Any]:
    """The results, with the gradients that the backward gives."""
    seed, mark, _ = _operators()
    seeds = [seed(y, name).requires_grad_() if flow else None for y, flow in zip(results, flows, strict=True)]
    given = _gradients(cls, context, seeds, results)
    pairs = [(gx, x) for gx, x, need in zip(given, args, context.needs_input_grad, strict=False) if need and gx is not None]
    if any(not gx.requires_grad for gx, _ in pairs):
        raise CaptureError(ADDS)
    return [y if g is None or not pairs else _with_gradient(mark, name, y, g, pairs) for y, g in zip(results, seeds, strict=True)]


def _with_gradient(mark: Any, name: str, y: Tensor, g: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """A result y that passes the gradient g as J does."""
    outputs, inputs = zip(*((gx, x.to(gx.dtype)) for gx, x in pairs), strict=True)
    (total,) = torch_grad(outputs, [g], inputs, create_graph=True, allow_unused=True)
    kept = mark(y, outputs, name)
    return kept if total is None else kept + (total - total.detach())


def _gradients(cls: Any, context: _Context, seeds: list[Tensor | None], results: list[Any]) -> Any:
    """The gradients that the backward gives for those of the results."""
    own = [None if g is None else g.clone() for g in seeds]  # which it may write
    with BackwardMode(own, results) as mode, modes_are_those_of(mode):
        given = [
            torch.zeros_like(y) if g is None and context.materializes and isinstance(y, Tensor) else g
            for g, y in zip(own, results, strict=True)
        ]
        answer = inspect.unwrap(cls.backward)(context, *given)
    return mode.inside(answer if isinstance(answer, tuple) else (answer,))
