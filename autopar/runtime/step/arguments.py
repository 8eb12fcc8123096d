"""The arguments of a call as a tree of torch: a batch that is a dataclass, a namespace or a dictionary of the user's own class is
taken apart too, which torch's trees take for one leaf. So are other objects that hold tensors, such as what a model returns: into
named parts, of which they are made again."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import (
    SUPPORTED_NODES,
    MappingKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)

_LEAVES = (Tensor, str, int, float, type(None))


class _Batch:
    """An object with tensors, as a node of a tree: its class, and its parts by key."""

    def __init__(self, cls: type, parts: Mapping[Any, Any]) -> None:
        self.cls, self.parts = cls, parts


@cache
def _registered() -> None:
    """Make a batch a node of torch's trees."""
    register_pytree_node(
        _Batch,
        lambda batch: (list(batch.parts.values()), (batch.cls, tuple(batch.parts))),
        lambda values, context: instance_of(context[0], dict(zip(context[1], values, strict=True))),
        serialized_type_name="autopar.Batch",
        flatten_with_keys_fn=lambda batch: (
            [(MappingKey(text), value) for text, value in zip(key_texts(batch.parts), batch.parts.values(), strict=True)],
            (batch.cls, tuple(batch.parts)),
        ),
    )


def flatten_arguments(arguments: Mapping[str, Any]) -> tuple[list[tuple[Any, Any]], TreeSpec]:
    """Return the leaves of the arguments of a call, each with its path, and their structure."""
    return tree_flatten_with_path(_tree(arguments))


def argument_parts(name: str, value: Any) -> tuple[list[tuple[Any, Any]], str]:
    """Return the leaves of one argument, each with its path, and what a forward sees of it beside them: the classes of its
    containers, and their keys in order; empty for a leaf."""
    if isinstance(value, _LEAVES):  # torch's trees are slow
        return [((MappingKey(name),), value)], ""
    tree = _tree(value)
    return tree_flatten_with_path({name: tree})[0], _container_text(tree)


def _container_text(value: Any) -> str:
    batch = isinstance(value, _Batch)
    kind, parts = (value.cls, value.parts) if batch else (type(value), value)
    if not batch and kind not in SUPPORTED_NODES and not isinstance(value, tuple):
        return ""
    if isinstance(parts, Mapping):
        inside = [f"{key!r} {_container_text(each)}".rstrip() for key, each in parts.items()]
    else:
        inside = [_container_text(each) for each in parts] if isinstance(parts, (list, tuple, deque)) else []
    return f"{kind.__qualname__}[{', '.join(inside)}]"


def map_arguments(function: Callable[[Any, Any], Any], arguments: Mapping[str, Any]) -> Any:
    """Return the arguments with the function of its path and itself for each leaf."""
    return tree_map_with_path(function, _tree(arguments))


def _tree(arguments: Any) -> Any:
    _registered()
    return tree_map(_opened, arguments)


def _opened(leaf: Any) -> Any:
    """An object that holds tensors as a node; any other leaf as it is. Objects of other classes stay one constant: what is set
    in them is seen by the user."""
    if isinstance(leaf, Mapping) and not dataclasses.is_dataclass(leaf):
        parts = {key: tree_map(_opened, value) for key, value in leaf.items()}
    elif isinstance(leaf, SimpleNamespace) or (dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)):
        parts = {name: tree_map(_opened, value) for name, value in parts_of(leaf)}
    else:
        return leaf
    return _Batch(type(leaf), parts) if any(isinstance(each, Tensor) for each in tree_leaves(parts)) else leaf


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
