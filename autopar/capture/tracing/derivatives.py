"""Derivatives that a forward takes itself (gradient penalties, inner steps): ``torch.autograd.grad``, and ``grad``,
``grad_and_value`` and ``vjp`` of ``torch.func``.

Export follows autograd through operations whose backward reads what it saw; the stand-in for the output's gradient is made in the
open, since one that autograd makes has no values. Where it loses track all the same, `explain.derivative_refused` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from autopar.capture.tracing.custom.backward_mode import in_backward
from autopar.capture.tracing.places import TORCH_ROOT, user_line
from autopar.errors import CaptureError

DERIVES = "has a backward that takes derivatives itself"
_GLOBALS = {**torch.autograd.grad.__globals__, "has_torch_function": lambda tensors: False}
torch_grad = FunctionType(torch.autograd.grad.__code__, _GLOBALS, "grad", torch.autograd.grad.__defaults__)
"""Torch's own, whose code is another while a model is traced. Modes do not see it: they would call that of the user's lines."""


@contextmanager
def derivatives_inside() -> Iterator[list[str]]:
    """While active, forwards may take derivatives. Yields the lines that do."""
    lines: list[str] = []
    pairs: list[tuple[Any, Any]] = [
        (torch.autograd.grad, _grad_instead),
        (torch.autograd.backward, _backward_instead),
        (apis.grad, _grad_of_function_instead),
        (apis.grad_and_value, _grad_and_value_instead),
        (torch.func.vjp, _vjp_instead),
    ]
    before = [(function.__code__, function.__defaults__) for function, _ in pairs]
    for function, instead in pairs:
        function.__code__, function.__defaults__ = instead.__code__, instead.__defaults__
    torch.autograd.grad.lines = lines  # type: ignore[attr-defined]
    try:
        yield lines
    finally:
        del torch.autograd.grad.lines  # type: ignore[attr-defined]
        for (function, _), (code, defaults) in zip(pairs, before, strict=True):
            function.__code__, function.__defaults__ = code, defaults


def _grad_instead(outputs, inputs, grad_outputs=None, *options, **named):  # type: ignore[no-untyped-def]
    from autopar.capture.tracing.derivatives import gradients  # it runs as a function of torch's module, whose names it sees

    return gradients(outputs, inputs, grad_outputs, *options, **named)


def _backward_instead(*args, **named):  # type: ignore[no-untyped-def]
    from autopar.capture.tracing.derivatives import refuse_backward

    refuse_backward()


def _grad_of_function_instead(func, argnums=0, has_aux=False):  # type: ignore[no-untyped-def]
    from autopar.capture.tracing.derivatives import gradient_function

    return gradient_function(func, argnums, has_aux)


def _grad_and_value_instead(func, argnums=0, has_aux=False):  # type: ignore[no-untyped-def]
    from autopar.capture.tracing.derivatives import gradient_function

    return gradient_function(func, argnums, has_aux, valued=True)


def _vjp_instead(func, *primals, has_aux=False):  # type: ignore[no-untyped-def]
    from autopar.capture.tracing.derivatives import products

    return products(func, primals, has_aux)


def gradients(outputs: Any, inputs: Any, grad_outputs: Any, *options: Any, **named: Any) -> Any:
    """``torch.autograd.grad`` whose gradients of the outputs are given."""
    if sys._getframe(2).f_code.co_filename.startswith(TORCH_ROOT):  # the backward of a scan, which is no derivative of the user's
        return torch_grad(outputs, inputs, grad_outputs, *options, **named)
    if in_backward():
        raise CaptureError(DERIVES)
    torch.autograd.grad.lines.append(user_line())  # type: ignore[attr-defined]
    every = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [None] * len(every) if grad_outputs is None else [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    given = [torch.ones_like(out) if each is None else each for out, each in zip(every, given, strict=True)]
    return torch_grad(every, inputs, given, *options, **named)


def refuse_backward() -> None:
    """CaptureError, for ``loss.backward()`` in a forward, whose gradients of parameters nobody would see."""
    raise CaptureError(f"{user_line()}: backward() inside of the forward would be lost: return the loss, and call backward on it")


def gradient_function(
    function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, valued: bool = False
) -> Callable[..., Any]:
    """``torch.func.grad`` by autograd; with `valued`, ``grad_and_value``."""
    several = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        inside = _OwnArguments([args[number] for number in several])
        given = list(args)
        for number, value in zip(several, inside.values, strict=True):
            given[number] = value
        with torch.enable_grad(), _Rows():
            result = function(*given, **kwargs)
            loss, *aux = result if has_aux else (result,)
            parts = inside.gradients(loss, None)
        answer = parts[0] if isinstance(argnums, int) else tuple(parts)
        more = ((loss, *aux) if has_aux else loss,) if valued else tuple(aux)
        return inside.seen((answer, *more) if more else answer)

    return gradient


def products(function: Callable[..., Any], primals: tuple[Any, ...], has_aux: bool) -> Any:
    """``torch.func.vjp`` by autograd."""
    inside = _OwnArguments(list(primals))
    with torch.enable_grad(), _Rows():
        result = function(*inside.values)
    value, *aux = result if has_aux else (result,)

    def product(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        with torch.enable_grad():
            found = inside.gradients(tree_leaves(value), tree_leaves(cotangents))
        return inside.seen(tuple(found))

    return (inside.seen(value), product, *inside.seen(aux))


class _Rows(TorchFunctionMode):
    """While active, ``linear`` is of rows: export loses the derivative of that of more dimensions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.linear or not args or args[0].dim() < 3:
            return func(*args, **(kwargs or {}))
        x, *rest = args
        return func(x.flatten(0, -2), *rest, **(kwargs or {})).unflatten(0, x.shape[:-1])


class _OwnArguments:
    """The arguments that a function is differentiated by, as tensors of their own. What is outside of the function does not turn
    gradients off in it, but what it gives then has no past."""

    def __init__(self, arguments: list[Any]) -> None:
        leaves, self.spec = tree_flatten(arguments)
        self.recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            self.leaves = [
                leaf.view_as(leaf) if leaf.requires_grad and self.recorded else leaf.detach().requires_grad_() for leaf in leaves
            ]
        self.values = tree_unflatten(self.leaves, self.spec)

    def gradients(self, outputs: Any, given: Any) -> Any:
        """Return the gradients of the arguments, in their form."""
        found = gradients(outputs, self.leaves, given, create_graph=True, allow_unused=True, materialize_grads=True)
        return tree_unflatten(list(found), self.spec)

    def seen(self, values: Any) -> Any:
        """Return results as they are outside of the function."""
        return values if self.recorded else tree_map_only(Tensor, Tensor.detach, values)
