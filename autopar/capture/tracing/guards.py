"""Refuses, while tracing, what would silently change gradients: hooks, custom autograd functions, some random operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.normalize.random import KNOWN
from autopar.capture.normalize.recurrent import is_fixed_recurrent
from autopar.capture.tracing.custom.functions import apply_traced
from autopar.capture.tracing.equal_layers import CannotOutline
from autopar.capture.tracing.places import user_asks, user_line
from autopar.errors import CaptureError
from autopar.runtime.compat.hooks import replaced

NO_GRAD_MARK = "autopar_no_grad"
ASSIGNED = "x.data = ... in the forward would be lost: make x a buffer (register_buffer), and write x.copy_(...) under no_grad"
REFUSED = {
    "_pack_padded_sequence": "pack_padded_sequence makes sizes of data, which shards cannot have: call the recurrent net on the "
    "padded batch, and mask what follows the end of each sequence (torch.where of arange(T) < lengths[:, None])",
}
"""Functions of torch by name, with why and what to do instead."""


@contextmanager
def number_lines() -> Iterator[list[str]]:
    """The lines, in order, at which the traced model makes a number of a size that should stay a symbol."""
    environment: Any = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
    lines: list[str] = []
    set_replacement = environment._set_replacement

    def recorded(symbol: Any, target: Any, *args: Any) -> None:
        if target.is_number:
            lines.append(user_line().rsplit("/", 1)[-1])
        set_replacement(symbol, target, *args)

    with replaced(environment, "_set_replacement", recorded):
        yield lines


def refuse_hooks(model: nn.Module) -> None:
    """CaptureError for backward hooks, which a rewritten program would not call."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"module {path or type(model).__name__!r} has a backward hook, which the parallel program would not call; "
                "remove it, or compute the gradient's change in forward"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"parameter {name} has a gradient hook, which the parallel program would not call; remove it")


def refuse_complex(model: nn.Module) -> None:
    """CaptureError for complex parameters, which optimizers of shards would have to know."""
    for name, tensor in model.named_parameters():
        if tensor.is_complex():
            raise CaptureError(
                f"{name} is {tensor.dtype}: keep it as pairs of real numbers, and call torch.view_as_complex in forward"
            )


class Refusals(TorchFunctionMode):
    """While active, functions of torch that export would fail in, or lose, are one line. CannotOutline, where layers are
    `outlined`, for a forward that asks whether a tensor requires a gradient: what comes out of a border does not say."""

    def __init__(self, outlined: bool) -> None:
        super().__init__()
        self.outlined = outlined

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        remedy = REFUSED.get(getattr(func, "__name__", "")) or (func == torch.Tensor.data.__set__ and ASSIGNED)  # type: ignore[attr-defined]
        if remedy:
            raise CaptureError(f"{user_line()}: {remedy}")
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # export ends the process where .data of a parameter is written
        if func == torch.Tensor.fill_diagonal_:
            return _fill_diagonal(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        asks = self.outlined and func == torch.Tensor.requires_grad.__get__ and user_asks()  # type: ignore[attr-defined]
        if asks and not result and torch.is_grad_enabled() and args[0].is_floating_point() and type(args[0]) is not nn.Parameter:
            raise CannotOutline(f"{user_line()}: not known whether a tensor requires a gradient")
        return result


def _fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """Return ``x.fill_diagonal_(...)``, whose functional form torch writes without a derivative."""
    places = [
        torch.arange(size, device=x.device).reshape([-1 if dim == own else 1 for dim in range(x.dim())])
        for own, size in enumerate(x.shape)
    ]
    if wrap and x.dim() == 2 and x.shape[0] > x.shape[1]:
        mask = (places[0] - places[1]) % (x.shape[1] + 1) == 0
    else:
        mask = places[0] == places[1]
        for place in places[2:]:
            mask = mask & (places[0] == place)
    return x.masked_fill_(mask, fill_value)


def refuse_random(op: str, node: fx.Node, where: str) -> None:
    """CaptureError for random operations that shards cannot draw apart: ranks would draw equal or contradicting numbers."""
    trains = any(arg is True for arg in node.args)
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or (op == "aten.rrelu" and trains)
    if random and not is_fixed_recurrent(op, node.args) and op not in KNOWN:
        raise CaptureError(
            f"{where}: {op} draws random numbers that shards cannot draw apart; "
            "use dropout, torch.rand_like, randn_like, bernoulli, or pass the numbers in with the batch"
        )


@contextmanager
def custom_functions(allowed: tuple[str, ...], outlined: bool = False) -> Iterator[None]:
    """While active, a user's ``autograd.Function`` is traced with its backward (`custom.functions`), unless it is
    `allowed`: then only its forward is. CaptureError where a hook is registered. CannotOutline, where layers are `outlined`, for
    functions that ask which of their arguments require gradients: what comes out of a border does not say."""
    function_apply = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        reentrant = cls is CheckpointFunction
        qualified = f"{cls.__module__}.{cls.__qualname__}"
        own = cls.__module__.startswith("torch.") or qualified in allowed or cls.__qualname__ in allowed
        if own and not reentrant:
            return function_apply.__get__(None, cls)(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and (arg.is_floating_point() or arg.is_complex())]
        if outlined and torch.is_grad_enabled() and not all(tensor.requires_grad for tensor in tensors):
            raise CannotOutline(f"{user_line()}: not known which arguments of {cls.__qualname__} require gradients")
        if not reentrant:
            return apply_traced(cls, user_line(), args)
        function, _, *operands = args  # its backward, if there is one, makes the gradients by a second forward
        with nullcontext() if any(tensor.requires_grad for tensor in tensors) else torch.no_grad():
            return function(*operands)

    def hook(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise CaptureError(f"{user_line()}: a tensor hook registered in forward would be lost when captured; remove it")

    with replaced(torch.autograd.Function, "apply", classmethod(apply)), replaced(torch.Tensor, "register_hook", hook):
        yield


def mark_no_grad(program: ExportedProgram) -> None:
    """Decompositions inline ``no_grad`` regions; the mark on the region's call survives on what comes out of it.

    The mark is the stack trace of the region's first operation, since the inlined operations lose theirs.
    """
    for node in program.graph.nodes:
        if "set_grad_enabled" in str(node.target) and node.args and node.args[0] is False:
            body = getattr(program.graph_module, str(getattr(node.args[1], "target", "")), None)
            inner = (each.meta.get("stack_trace") for each in body.graph.nodes) if body is not None else ()
            mark = {NO_GRAD_MARK: next((trace for trace in inner if trace), " ")}
            node.meta["custom"] = {**(node.meta.get("custom") or {}), **mark}
