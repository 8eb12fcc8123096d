"""Methods and properties of the model's class, called on the parallel model.

They run on the parallel model. In a pipeline, and where a forward leaves tensors out, it lacks parameters of the model: there a
count of them (or of FLOPs) is asked of the model without data, which has all, and can tell shapes and no values.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import io
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import RuntimeProblem
from .frozen_reads import FrozenReads

_QUESTIONS_OF_SHAPE = frozenset(
    ("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "itemsize", "element_size", "nbytes", "stride")
    + ("is_floating_point", "is_complex", "layout", "requires_grad", "is_leaf", "len", "hash", "get", "is_sparse", "is_quantized")
    + ("names", "data", "detach")
)
"""Those whose answer a tensor without data gives as the model's own."""


def call_method(method: FunctionType, skeleton: nn.Module, node: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method of a module of the model, for the `node` that stands for it (`skeleton`: without data)."""
    counts = _returns_values(method) and all(map(_is_plain, (*args, *kwargs.values())))
    # super() takes no parallel model, which is of another class
    if counts and (not _has_all_tensors(node, skeleton) or "__class__" in method.__code__.co_freevars):
        result = _count(method, skeleton, node, *args, **kwargs)
        if result is not None:
            return result
    return method(node, *args, **kwargs)


def _has_all_tensors(node: nn.Module, skeleton: nn.Module) -> bool:
    named = ((name for name, _ in (*each.named_parameters(), *each.named_buffers())) for each in (skeleton, node))
    return set(next(named)) <= set(next(named))


def _returns_values(method: FunctionType) -> bool:
    """Return whether any of its returns has a value."""
    steps = [(each.opname, each.argval) for each in dis.get_instructions(method)]
    ends = ((before, now) for before, now in pairwise(steps) if now[0].startswith("RETURN_"))
    return any(before != ("LOAD_CONST", None) and now != ("RETURN_CONST", None) for before, now in ends)


def _count(method: FunctionType, skeleton: nn.Module, node: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return the numbers or text that a method returns for the model without data; None, and nothing is changed, where it
    returns others, reads more than shapes, or changes modes or modules."""
    output, reads = io.StringIO(), _ShapeReads()
    with _as_now(skeleton, node), contextlib.suppress(Exception):
        restore, before, result = _restoring(skeleton), _members(skeleton), None
        try:
            with contextlib.redirect_stdout(output), reads:
                result = method(skeleton, *args, **kwargs)
        finally:
            if result is None or reads.more or not _is_plain(result) or _members(skeleton) != before:
                restore()  # the parallel model sets it once more
                result = None
        if result is not None:
            print(output.getvalue(), end="")
        return result
    return None


def _function_name(func: Any) -> tuple[str, str]:
    """Return the name of a function of torch (``__get__`` of a property), and the word for it (``grad``)."""
    full = word = getattr(func, "__name__", "")
    if full in ("__get__", "__set__"):  # of a property
        word = getattr(getattr(func, "__self__", None), "__name__", word)
    return full, word.strip("_")


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in values, and in lists of them."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _tensors_in(each)
        elif isinstance(each, torch.Tensor):
            yield each


class _ShapeReads(TorchFunctionMode):
    """Ends a method with an error where it reads more than shapes, dtypes and `requires_grad` of tensors without data, or changes
    them. `more`: it has done so, also where the method suppresses the error."""

    def __init__(self) -> None:
        super().__init__()
        self.more = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        full, name = _function_name(func)
        changes = full == "__set__" or (full.endswith("_") and not full.startswith("__"))
        known = name in _QUESTIONS_OF_SHAPE and not changes
        if not known and any(each.is_meta for each in _tensors_in((args, tuple(kwargs.values())))):
            self.more = True
            raise RuntimeProblem(f"{name} of a tensor without data")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _as_now(skeleton: nn.Module, node: nn.Module) -> Iterator[None]:
    """Give the model without data the modes of the parallel model, and which of its parameters train; hide what its forward sets,
    which it does not know."""
    assignments = node.__dict__["assignments"]
    frozen: FrozenReads = assignments.plain.frozen
    trains = {name: each.requires_grad for name, each in node.named_parameters(remove_duplicate=False)}
    modes = {path: module.training for path, module in node.named_modules()}
    planned = [(each, each.requires_grad) for each in skeleton.parameters()]
    before = [(vars(module), module.training) for module in skeleton.modules()]
    hidden = [(vars(module), name) for module in skeleton.modules() for name in vars(module) if frozen.is_written(module, name)]
    values = [fields.pop(name) for fields, name in hidden]
    for path, module in skeleton.named_modules():
        module.training = modes.get(path, module.training)
    for name, parameter in skeleton.named_parameters():
        parameter.requires_grad_(trains.get(name, parameter.requires_grad))
    try:
        yield
    finally:
        for parameter, train in planned:
            parameter.requires_grad_(train)
        for fields, training in before:
            fields["training"] = training
        for (fields, name), value in zip(hidden, values, strict=True):
            fields[name] = value


def _members(model: nn.Module) -> list[tuple[int, ...]]:
    """Return what is another after modes, modules, parameters or buffers have changed."""
    kinds = ((each, (each._modules, each._parameters, each._buffers)) for each in model.modules())
    return [(module.training, *(id(value) for held in kind for value in held.values())) for module, kind in kinds]


def _restoring(model: nn.Module) -> Callable[[], None]:
    """A function that gives the modules of a model the attributes of now again, what is in their lists and dictionaries too (peft
    appends to ``merged_adapters``), and the generators of this process their states."""
    every = [(vars(module), dict(vars(module))) for module in model.modules()]
    inside: list[tuple[Any, Any]] = [
        (value, copy.copy(value)) for _, own in every for value in own.values() if type(value) in (list, dict, set)
    ]
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        for held, before in (*every, *inside):
            if isinstance(held, list):
                held[:] = before
            else:
                held.clear()
                held.update(before)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])

    return restore


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (int, float, complex, str, torch.dtype))
