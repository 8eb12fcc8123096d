"""Arguments that are no tensors, as text: equal for equal values, on every rank."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

import torch

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def constant_text(value: object) -> str:
    """``repr`` of a plain value; else the type's name and a digest of what the object holds, so that an object that was changed
    is another constant."""
    if isinstance(value, torch.Tensor):
        return "a tensor"  # which is no constant
    if _is_plain(value):
        return repr(value)
    return f"{type(value).__name__}_{hashlib.blake2b(_held(value, ()).encode(), digest_size=4).hexdigest()}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__module__ == "torch"


def _held(value: Any, around: tuple[int, ...]) -> str:
    """All that an object holds. `around`: the objects that it is a part of."""
    if _is_plain(value) and not isinstance(value, torch.Tensor):
        return repr(value)
    if id(value) in around:
        return f"<{around[::-1].index(id(value))}>"
    inside = (*around, id(value))
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value  # a DTensor
        return f"tensor {value.dtype} {tuple(value.shape)} {'' if value.is_meta else local.tolist()}"
    if isinstance(value, Mapping):
        parts = [f"{_held(key, inside)}: {_held(each, inside)}" for key, each in value.items()]
    elif isinstance(value, Set):
        parts = sorted(_held(each, inside) for each in value)
    elif isinstance(value, (list, tuple)):
        parts = [_held(each, inside) for each in value]
    elif isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    else:
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
        own = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        parts = [_held(own, inside) if own else _ADDRESS.sub("", repr(value))]
    return f"{type(value).__qualname__}({', '.join(parts)})"
