"""The element of a tuple that the model calls its loss: read from the source of its forward, where a tuple has no field names.

``return logits, loss`` (nanoGPT), ``return (loss,) + output`` (transformers), ``return logits, F.cross_entropy(...)``. A forward
that only calls another module returns what that one does; one that makes a tuple of a result class says it in its annotation.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

LOSS_NAMES = frozenset(("loss", "total_loss"))
_FUNCTIONS = frozenset(("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "criterion"))
_DEPTH = 8


def calls_it_loss(module: nn.Module, length: int, index: int) -> bool:
    """Whether each ``return`` of the forward that may have made a tuple of this length has the loss at this index. False where
    the source is not there."""
    forward = inspect.unwrap(getattr(type(module), "forward"))  # noqa: B009  (a module class always has one)
    elements = [each for each in _elements(module, forward, length, index, _DEPTH) if not _is_none(each)]
    if not elements:
        return index == 0 and _annotated(forward)
    return all(map(_says_loss, elements))


def _elements(module: nn.Module, forward: Callable[..., Any], length: int, index: int, depth: int) -> Iterator[ast.expr]:
    """The expressions at this index of the tuples that a forward returns."""
    body = _function(forward)
    for each in ast.walk(body) if body is not None else ():
        if isinstance(each, ast.Return) and each.value is not None:
            for value in _resolved(each.value, body, depth):
                called = _submodule(module, value)
                if called is not None and depth:
                    inner = inspect.unwrap(getattr(type(called), "forward"))  # noqa: B009
                    yield from _elements(called, inner, length, index, depth - 1)
                elif isinstance(value, ast.Tuple) and len(value.elts) == length:
                    yield value.elts[index]
                elif isinstance(value, ast.BinOp) and isinstance(value.left, ast.Tuple) and index < len(value.left.elts) < length:
                    yield value.left.elts[index]


def _function(forward: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def _resolved(value: ast.expr, body: ast.AST | None, depth: int) -> Iterator[ast.expr]:
    """An expression, or those that a name was assigned, or the branches of a condition."""
    if isinstance(value, ast.IfExp) and depth:
        yield from _resolved(value.body, body, depth - 1)
        yield from _resolved(value.orelse, body, depth - 1)
    elif isinstance(value, ast.Name) and body is not None and depth:
        for each in ast.walk(body):
            if isinstance(each, ast.Assign) and any(isinstance(to, ast.Name) and to.id == value.id for to in each.targets):
                yield from _resolved(each.value, body, depth - 1)
    else:
        yield value


def _submodule(module: nn.Module, value: ast.expr) -> nn.Module | None:
    """The module that ``self.model(...)`` or ``self.model.forward(...)`` calls."""
    if not isinstance(value, ast.Call):
        return None
    path, target = list[str](), value.func
    while isinstance(target, ast.Attribute):
        path.insert(0, target.attr)
        target = target.value
    if not (isinstance(target, ast.Name) and target.id == "self" and path):
        return None
    found: Any = module
    for name in path[:-1] if path[-1] == "forward" else path:
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) and found is not module else None


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _says_loss(value: ast.expr) -> bool:
    if isinstance(value, ast.Name):
        return value.id in LOSS_NAMES
    if isinstance(value, ast.Attribute):
        return value.attr in LOSS_NAMES
    if isinstance(value, ast.BinOp):
        return _says_loss(value.left) or _says_loss(value.right)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Attribute):  # F.mse_loss(...), self.criterion(...), loss.mean()
        return _is_function(value.func.attr) or _says_loss(value.func.value)
    return isinstance(value.func, ast.Name) and _is_function(value.func.id)


def _is_function(name: str) -> bool:
    return name in _FUNCTIONS or "loss" in name.lower().split("_")


def _annotated(forward: Callable[..., Any]) -> bool:
    """Return whether a decorated forward returns a class whose first field is the loss (``return_dict=False`` of
    transformers)."""
    try:
        annotation = typing.get_type_hints(forward).get("return")
    except Exception:  # whatever the evaluation of an annotation raises
        return False
    for each in (annotation, *typing.get_args(annotation)):
        if dataclasses.is_dataclass(each) and (fields := dataclasses.fields(each)):
            return fields[0].name in LOSS_NAMES
    return False
