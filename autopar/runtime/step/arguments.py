"""The arguments of a call as a tree of torch: a batch that is a dataclass, a namespace or a dictionary of the user's own class is
taken apart too, which torch's trees take for one leaf."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor
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

from .structures import instance_of, key_texts, parts_of

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
