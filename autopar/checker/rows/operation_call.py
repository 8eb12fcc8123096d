"""An operation of the captured graph with its arguments by name, and of the text with the arguments that ranks give it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.checker.shards import Shape


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor among the arguments, by the name of the value in the captured block."""

    name: str


@dataclass(frozen=True, slots=True)
class DTypeName:
    """A dtype among the arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class WholeCall:
    """An operation on global tensors: ``aten.add`` with its arguments by name, the shapes of operands and results."""

    op: str
    arguments: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ()
    result_dtypes: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        found = self.arguments.get(name)
        return default if found is None else found

    def dim(self, name: str = "dim", default: int = -1, rank: int | None = None) -> int:
        """An argument that is a dimension, from 0."""
        rank = len(self.shapes[0]) if rank is None else rank
        return int(self.get(name, default)) % max(1, rank)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """Several dimensions, all where none is given."""
        rank, found = len(self.shapes[0]), self.arguments.get(name)
        if found is None or found == ():
            return tuple(range(rank))
        return tuple(int(each) % max(1, rank) for each in (found if isinstance(found, tuple) else (found,)))


@lru_cache(maxsize=4096)
def schema_of(op: str) -> tuple[tuple[str, ...], tuple[Any, ...], int] | None:
    """Names and defaults of the arguments of ``aten.add.Tensor``, and how many may be given by position."""
    namespace, name, *overload = op.split(".")
    if namespace == "ap":  # some are registered with torch, where a model was captured in this process
        return None
    try:
        found = getattr(getattr(torch.ops, namespace), name)
        usual = "memory_format" if name == "empty" else "default"  # `empty` has no default
        schema = getattr(found, overload[0] if overload else usual)._schema
    except (AttributeError, RuntimeError):
        return None
    arguments = schema.arguments
    return (
        tuple(each.name for each in arguments),
        tuple(each.default_value if each.has_default_value() else None for each in arguments),
        sum(not each.kwarg_only for each in arguments),
    )


def bind(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included. ValueError where they do not fit. autopar's own operations have no schema: their
    arguments are numbered."""
    schema = schema_of(op)
    if schema is None:
        return {str(index): each for index, each in enumerate(args)} | {k: v for k, v in kwargs.items() if v is not None}
    names, defaults, positional = schema
    if len(args) > positional or set(kwargs) - set(names):
        raise ValueError(f"{op} does not take these arguments")
    out = dict(zip(names, map(plain, defaults), strict=True))
    out.update(zip(names, args, strict=False))
    out.update(kwargs)
    return out


def plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, torch.dtype):
        return DTypeName(str(value).removeprefix("torch."))
    return value if isinstance(value, (int, float, bool, str, type(None))) else None


def tensors_of(value: Any, kind: type[Any]) -> Iterator[Any]:
    """The tensors among arguments, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each, kind)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each, kind)


def same_argument(one: Any, other: Any) -> bool:
    """Whether two arguments that are no tensors are equal; True is not 1, and 2 is 2.0."""
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same_argument, one, other))
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return bool(one == other) or (one != one and other != other)
