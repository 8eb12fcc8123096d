"""The shapes of what operations return, for ranks that have no elements of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from ..compat.dtensor import meta_like, outside_of_fakes


def result_shapes(op: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation as meta tensors."""
    call = op, torch.get_default_dtype(), _signature(args), tuple(kwargs), _signature(tuple(kwargs.values()))
    try:
        return _known_shapes(*call)
    except TypeError:  # symbols of a trace have no hash
        return _computed_shapes(*call)


class _Shape(NamedTuple):
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _signature(value: Any) -> Any:
    """An argument as far as the shapes of results depend on it: a number with its type, since 1 and 1.0 are equal."""
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_signature, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _computed_shapes(op: Any, _default: torch.dtype, args: Any, names: Sequence[str], options: Any) -> Any:
    with outside_of_fakes():
        try:
            return op(*_arguments(args), **dict(zip(names, _arguments(options), strict=True)))
        except NotImplementedError:  # torch knows no shapes: of zeros
            results = op(*_arguments(args, "cpu"), **dict(zip(names, _arguments(options, "cpu"), strict=True)))
            return tree_map_only(torch.Tensor, meta_like, results)


_known_shapes = lru_cache(maxsize=2**12)(_computed_shapes)


def _arguments(signatures: Sequence[Any], device: str = "meta") -> list[Any]:
    """Arguments with these signatures, zeros."""
    out: list[Any] = []
    for each in signatures:
        if isinstance(each, _Shape):
            out.append(torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=device).zero_())
        elif len(each) == 2 and isinstance(each[0], type):
            out.append(torch.device(device) if each[0] is torch.device else each[1])
        else:
            out.append(_arguments(each, device))
    return out
