"""Derivatives that a forward takes itself (gradient penalties, inner steps): ``torch.autograd.grad`` and ``torch.func.grad``.

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

from autopar.capture.tracing.places import TORCH_ROOT, user_line
from autopar.errors import CaptureError

torch_grad = FunctionType(torch.autograd.grad.__code__, torch.autograd.grad.__globals__, "grad", torch.autograd.grad.__defaults__)
"""Torch's own, whose code is another while a model is traced."""


@contextmanager
def derivatives_inside() -> Iterator[list[str]]:
    """While active, forwards may take derivatives. Yields the lines that do."""
    lines: list[str] = []
    pairs: list[tuple[Any, Any]] = [
        (torch.autograd.grad, _grad_instead),
        (torch.autograd.backward, _backward_instead),
        (apis.grad, _grad_of_function_instead),
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


def gradients(outputs: Any, inputs: Any, grad_outputs: Any, *options: Any, **named: Any) -> Any:
    """``torch.autograd.grad`` whose gradients of the outputs are given."""
    if sys._getframe(2).f_code.co_filename.startswith(TORCH_ROOT):  # the backward of a scan, which is no derivative of the user's
        return torch_grad(outputs, inputs, grad_outputs, *options, **named)
    torch.autograd.grad.lines.append(user_line())  # type: ignore[attr-defined]
    every = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [None] * len(every) if grad_outputs is None else [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    given = [torch.ones_like(out) if each is None else each for out, each in zip(every, given, strict=True)]
    return torch_grad(every, inputs, given, *options, **named)


def refuse_backward() -> None:
    """CaptureError, for ``loss.backward()`` in a forward, whose gradients of parameters nobody would see."""
    raise CaptureError(f"{user_line()}: backward() inside of the forward would be lost: return the loss, and call backward on it")


def gradient_function(function: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool) -> Callable[..., Any]:
    """``torch.func.grad`` by autograd."""
    several = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten([args[number] for number in several])
        own = [leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves]
        given = list(args)
        for number, value in zip(several, torch.utils._pytree.tree_unflatten(own, spec), strict=True):
            given[number] = value
        with torch.enable_grad():
            result = function(*given, **kwargs)
            loss, *aux = result if has_aux else (result,)
            found = gradients(loss, own, None, create_graph=True, allow_unused=True, materialize_grads=True)
        parts = torch.utils._pytree.tree_unflatten(list(found), spec)
        answer = parts[0] if isinstance(argnums, int) else tuple(parts)
        return (answer, *aux) if has_aux else answer

    return gradient
