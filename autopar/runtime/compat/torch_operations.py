"""Torch's operations by their names, schemas and tags: those that draw, write, make something new, or communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor


def random_operations() -> list[Any]:
    """Torch's operations that draw random numbers, by their tag, but for those that only kernels call (of attention, recurrences
    on a device). Seen on 2.13.0; takes 0.1 s, since ``dir(torch.ops.aten)`` has only those that were used."""
    operations = _operations(lambda name: not name.startswith("_") or name in _RANDOM_KERNELS)
    return [op for op in operations if torch.Tag.nondeterministic_seeded in op.tags]


_RANDOM_KERNELS = frozenset(("_standard_gamma", "_sample_dirichlet", "_fused_dropout"))
"""Kernels that functions for users call directly."""


def new_results() -> list[Any]:
    """Torch's operations that write into no tensor and draw no random numbers, by their schemas and tags. Seen on 2.13.0."""
    drawn = torch.Tag.nondeterministic_seeded
    return [op for op in _operations(lambda _: True) if not op._schema.is_mutable and drawn not in op.tags]


def in_place_operations() -> list[Any]:
    """Torch's operations on one tensor that write into it, by their names and schemas. Seen on 2.13.0."""
    operations = []
    for op in _operations(lambda name: name.endswith("_") and not name.startswith("_")):
        first = op._schema.arguments[0] if op._schema.arguments else None
        if first is not None and first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor":
            operations.append(op)
    return operations


def all_operations() -> list[Any]:
    """Torch's operations. Takes some 0.1 s. Seen on 2.13.0."""
    return _operations(lambda name: True)


def loss_decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's losses with a `reduction`, and their backwards, for which DTensor has no rules, each with a function that computes
    it by other operations. Seen on 2.13.0: DTensor finds rules by these functions, with numbers of elements that are a part's."""
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    losses = {}
    for op, run in decomposition_table.items():
        arguments = op._schema.arguments if isinstance(op, torch._ops.OpOverload) else ()
        if op not in rules and any(each.name == "reduction" for each in arguments) and not any(each.is_out for each in arguments):
            losses[op] = run
    return losses


def _operations(wanted: Callable[[str], bool]) -> list[Any]:
    """The operations of ATen with these names, in order."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith("aten::") and wanted(name):
            found.append(getattr(getattr(torch.ops.aten, name, None), overload or "default", None))
    return sorted((op for op in found if op is not None), key=str)


def collective_operations() -> list[Any]:
    """The operations of torch.distributed's own functions (``dist.all_reduce``). Seen on 2.13.0."""
    names = {full.split("::")[1].split(".")[0] for full in torch._C._dispatch_get_all_op_names() if full.startswith("c10d::")}
    return [getattr(torch.ops.c10d, name).default for name in sorted(names)]
