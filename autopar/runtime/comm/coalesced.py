"""Coalesced collectives: the conversions of several tensors as one flat collective for each kind, reduction and dtype.

`launch_collectives` returns the raw outputs, still in flight; `finish_collectives` waits for them and cuts them apart. Between
the two the program computes. Tensors are laid out as ``[rows, k]`` with one row for each receiving rank (or one row in all), and
concatenated along the second dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..compat.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, wait_tensor
from .conversions import AxisOperation, apply_locally, join_shards, split_shards


def needs_gather(operation: AxisOperation, x: torch.Tensor) -> bool:
    """An all-to-all within one dimension (between different `parts`) is done by an all-gather and a slice."""
    return operation.kind == "all_to_all" and operation.dim % x.dim() == operation.to % x.dim()


def _rows(operation: AxisOperation, x: torch.Tensor, size: int) -> torch.Tensor:
    """The layout that the collective reads, ``[rows, k]``."""
    if operation.kind == "reduce_scatter":
        return split_shards(x, operation.dim, operation.parts, size).reshape(size, -1)
    if operation.kind == "all_to_all" and not needs_gather(operation, x):
        return split_shards(x, operation.to, operation.to_parts, size).reshape(size, -1)
    return x.reshape(1, -1)


def _shape(operation: AxisOperation, x: torch.Tensor, size: int) -> list[int]:
    """The shape of one received row."""
    shape = list(x.shape)
    if operation.kind == "reduce_scatter":
        shape[operation.dim] //= size
    if operation.kind == "all_to_all" and not needs_gather(operation, x):
        shape[operation.to] //= size
    return shape


def _communicate(kind: str, op: str, flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    if kind == "all_reduce":
        return all_reduce(flat, op, group)
    if kind == "reduce_scatter":
        return reduce_scatter(flat, op, size, group)
    if kind == "all_to_all":
        return all_to_all(flat, size, group)
    return all_gather(flat, size, group)


def _kind(operation: AxisOperation, x: torch.Tensor) -> str:
    return "gather" if needs_gather(operation, x) else operation.kind


def _coalesced(operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the communicating tensors that share a collective: same kind, reduction and dtype."""
    groups: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index, (operation, x) in enumerate(zip(operations, xs, strict=True)):
        if operation.communicates:
            groups.setdefault((_kind(operation, x), operation.op, x.dtype), []).append(index)
    return list(groups.values())


def launch_collectives(
    operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor], size: int, group: str
) -> list[torch.Tensor]:
    """Launches one collective for each group of tensors that can share one; returns their outputs, still in flight."""
    raws = []
    for indices in _coalesced(operations, xs):
        rows = [_rows(operations[i], xs[i], size) for i in indices]
        flat = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).contiguous()
        first = operations[indices[0]]
        raws.append(_communicate(_kind(first, xs[indices[0]]), first.op, flat.view(-1), size, group))
    return raws


def finish_collectives(
    operations: Sequence[AxisOperation], xs: Sequence[torch.Tensor], raws: Sequence[torch.Tensor], size: int, coordinate: int
) -> list[torch.Tensor]:
    """The results in the order of `xs`, whose values are read only where an operation needs no communication."""
    out: list[torch.Tensor | None] = [None] * len(xs)
    for index, (operation, x) in enumerate(zip(operations, xs, strict=True)):
        if not operation.communicates:
            out[index] = apply_locally(operation, x, size, coordinate)
    for indices, raw in zip(_coalesced(operations, xs), raws, strict=True):
        rows = size if _kind(operations[indices[0]], xs[indices[0]]) in ("gather", "all_to_all") else 1
        received = wait_tensor(raw).view(rows, -1)
        offset = 0
        for i in indices:
            shape = _shape(operations[i], xs[i], size)
            width = prod(shape)
            # contiguous: the backward of torch's batch norm on CPUs reads the memory of a weight as if it were without gaps
            part = received if len(indices) == 1 else received.narrow(1, offset, width).contiguous()
            offset += width
            out[i] = _assemble(operations[i], xs[i], part.reshape(rows, *shape), size, coordinate)
    return [x for x in out if x is not None]


def _assemble(operation: AxisOperation, x: torch.Tensor, stacked: torch.Tensor, size: int, coordinate: int) -> torch.Tensor:
    if operation.kind in ("all_reduce", "reduce_scatter"):
        return stacked.squeeze(0)
    whole = join_shards(stacked, operation.dim, operation.parts)
    if needs_gather(operation, x):
        return apply_locally(AxisOperation("slice", operation.to, operation.to_parts), whole, size, coordinate)
    return whole
