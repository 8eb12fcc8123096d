"""Objects that hold tensors, such as what a model returns: taken apart into named parts, and made again of them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn


def parts_of(item: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a compound item, in order. The attributes of an object are all its own: those that begin with ``_`` are
    what its methods read."""
    if isinstance(item, (type, nn.Module)):
        return
    if isinstance(item, Mapping) and not dataclasses.is_dataclass(item):
        yield from zip(key_texts(item), item.values(), strict=True)
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from zip(item._fields, item, strict=True)
    elif isinstance(item, (tuple, list)):
        yield from ((str(index), value) for index, value in enumerate(item))
    elif dataclasses.is_dataclass(item) or is_object(item):
        names = [each.name for each in dataclasses.fields(item)] if dataclasses.is_dataclass(item) else []
        yield from ((name, getattr(item, name, None)) for name in names)
        if not isinstance(item, Mapping):  # transformers' ModelOutput is a dataclass and a dictionary in one
            yield from ((name, value) for name, value in attributes_of(item).items() if name not in names)


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of an object, also those that its classes have ``__slots__`` for."""
    slots = [name for kind in reversed(type(item).__mro__) for name in _slots(kind) if hasattr(item, name)]
    return {name: getattr(item, name) for name in slots} | getattr(item, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def is_object(item: Any) -> bool:
    """Return whether an item is made of its attributes: no number, function, class or module."""
    if isinstance(item, (type, nn.Module)) or not (
        attributes_of(item) or hasattr(item, "__dict__") or dataclasses.is_dataclass(item)
    ):
        return False
    try:
        _empty(type(item))
    except TypeError:
        return False
    return True


def _empty(cls: Any) -> Any:
    """A new object of a class without attributes. TypeError for one that Python makes otherwise, such as a function."""
    return cls.__new__(cls) if issubclass(cls, (SimpleNamespace, list)) else object.__new__(cls)


def key_texts(item: Mapping[Any, Any]) -> list[str]:
    """The keys of a mapping as words of a path, each another one."""
    texts = dict[str, Any]()
    for key in item:
        text = str(key)
        text = repr(key) if text in texts or not text.isprintable() else text
        while text in texts:  # "0", 0 and '0'
            text = f"<{text}>"
        texts[text] = key
    return list(texts)


def object_at(name: str) -> Any:
    """The object at a name in a module that this process has loaded (``torch.nn:Linear``); None where there is nothing."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def instance_of(cls: Any, fields: Mapping[Any, Any]) -> Any:
    """An object of this class with these parts. A class that this process has not loaded becomes a plain namespace."""
    if not isinstance(cls, type):
        return SimpleNamespace(**fields)
    if issubclass(cls, Mapping):
        if dataclasses.is_dataclass(cls) or not issubclass(cls, dict):
            return cls(**fields) if dataclasses.is_dataclass(cls) else cls(fields)  # type: ignore[call-arg]
        mapping = cls.__new__(cls)  # its __init__ may take other arguments
        mapping.update(fields)
        return mapping
    if issubclass(cls, tuple):
        return cls._make(fields.values()) if hasattr(cls, "_make") else cls(fields.values())
    instance = _empty(cls)
    if isinstance(instance, list):
        instance.extend(fields.values())
        return instance
    for key, value in fields.items():
        object.__setattr__(instance, key, value)
    return instance
