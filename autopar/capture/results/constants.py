"""The forms of what a model returns beside tensors, and of the keys of its dictionaries: plain values, and what has a name.

An enum member, a class, a function and a dtype are held by name, since a plan is data: what has none (a lambda) cannot be held.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from numbers import Integral, Real
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.ir.interface import Form
from autopar.runtime.step.arguments import key_texts, object_at


def constant_form(item: Any) -> Form:
    """The form of a value without parts; None for one that a plan cannot hold."""
    if isinstance(item, enum.Enum):
        cls, value = name_of(type(item)), constant_form(item.value)
        return ("member", cls, value) if cls and value else None
    if item is None or isinstance(item, (bool, str)):
        return ("constant", str(item) if isinstance(item, str) else item)
    if isinstance(item, Real):  # also numpy's
        return ("constant", int(item) if isinstance(item, Integral) else float(item))
    if isinstance(item, torch.dtype):
        return ("named", str(item).replace("torch.", "torch:"))
    if isinstance(item, torch.device):
        return ("device", str(item))
    if isinstance(item, (type, FunctionType, BuiltinFunctionType)):
        name = name_of(item)
        return ("named", name) if name else None
    if type(item) is tuple:
        forms = tuple(map(constant_form, item))
        return ("tuple", forms) if all(forms) else None
    return None


def key_forms(item: Mapping[Any, Any]) -> tuple[tuple[Form, ...], ...]:
    """The forms of the keys of a dictionary; empty where they are the words of its paths. CaptureError for a key that a plan
    cannot hold."""
    if list(item) == key_texts(item):
        return ()
    forms = tuple(map(constant_form, item))
    for key, form in zip(item, forms, strict=True):
        if form is None:
            raise CaptureError(
                f"the model returns a dictionary with the key {str(key)[:80]!r}, a {type(key).__name__}, which no plan can hold: "
                "let its keys be texts, numbers, members of an enum, or tuples of these"
            )
    return (forms,)


def factory_form(factory: Any) -> Form:
    """The form of the factory of a ``defaultdict``. CaptureError for one that a plan cannot hold."""
    form = constant_form(factory)
    if form is None or not isinstance(factory, (type, type(None))):
        raise CaptureError(
            "the model returns a defaultdict of a function, which no plan can hold: return dict(...) of it, or give it a class "
            "(defaultdict(list))"
        )
    return form


def name_of(item: Any) -> str:
    """Return where a class or function lies (``module:name``); empty where that is not it."""
    name = f"{item.__module__}:{item.__qualname__}"
    return name if object_at(name) is item else ""
