"""Branches and loops that data decides. Every rank has the same predicate, so all take the same branch.

A region is ``(names of its arguments, statements, names of its results)``; a statement is ``(names of its results, operation,
args, kwargs)``, with ``%name`` for a value. Autograd runs through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..compat.autograd import has_data
from ..errors import RuntimeProblem
from .opaque import reach_all

Region = tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]


def cond(predicate: Tensor, operands: Sequence[Tensor], true: Region, false: Region, results: Sequence[int] | None = None) -> Any:
    """The results of one branch (those of number `results`): a tensor, or several. Gradients of what the branch did not read are
    zeros. Without data (a dry run) the first branch."""
    values = run(true if _decides(predicate, True) else false, operands)
    return _wanted(reach_all(values, operands), results)


def while_loop(
    carried: Sequence[Tensor], further: Sequence[Tensor], condition: Region, body: Region, results: Sequence[int] | None = None
) -> Any:
    """Return `carried` (those of number `results`) after the last pass: a tensor, or several. Without data one pass."""
    values = list(carried)
    passes = 0
    while _decides(run(condition, (*values, *further))[0], passes == 0):
        values = run(body, (*values, *further))
        passes += 1
    return _wanted(reach_all(values, (*carried, *further)), results)


def _decides(predicate: Tensor, otherwise: bool) -> bool:
    return bool(predicate) if has_data(predicate) else otherwise


def _wanted(values: list[Tensor], results: Sequence[int] | None) -> Any:
    wanted = values if results is None else [values[number] for number in results]
    return wanted[0] if len(wanted) == 1 else wanted


def run(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of a region."""
    names, statements, results = region
    values: dict[str, Tensor] = dict(zip(names, operands, strict=True))
    device = operands[0].device if operands else torch.device("cpu")
    for targets, op, args, kwargs in statements:
        if op in ("ap.cond", "ap.while_loop"):
            first, second = (_filled(arg, values) for arg in args[:2])
            result = (cond if op == "ap.cond" else while_loop)(first, second, *args[2:])
        else:
            call, makes = _operation(op)
            options = {key: _filled(arg, values) for key, arg in kwargs}
            if makes:
                options["device"] = device
            result = call(*_filled(args, values), **options)
        several = result if isinstance(result, (tuple, list)) else (result,)
        values.update(zip(targets, several, strict=True))
    return [values[name] for name in results]


def _filled(arg: Any, values: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, str) and arg.startswith("%"):
        return values[arg[1:]]
    return tuple(_filled(item, values) for item in arg) if isinstance(arg, tuple) else arg


@lru_cache(maxsize=1024)
def _operation(op: str) -> tuple[Any, bool]:
    """The operation of ATen, and whether it makes a tensor of nothing but numbers (on a device). RuntimeProblem for others."""
    words = op.split(".")
    if words[0] != "aten" or len(words) not in (2, 3):
        raise RuntimeProblem(f"{op} cannot run inside of torch.cond or while_loop: move it outside of the branch")
    operation: Any = getattr(getattr(torch.ops.aten, words[1]), words[2] if len(words) == 3 else "default")
    arguments = operation._schema.arguments
    makes = any(each.name == "device" for each in arguments) and not any("Tensor" in str(each.type) for each in arguments)
    return operation, makes
