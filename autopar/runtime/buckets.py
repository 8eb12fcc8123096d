"""Moves of several tensors as one flat collective: lay out, communicate, wait, cut apart.

`launch` returns the raw, not yet arrived results; `land` waits for them. Between the two the program computes.
Tensors are laid out as ``[rows, k]`` with a row per receiving rank (or one row), concatenated along the second dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from .compat import all_gather, all_reduce, all_to_all, reduce_scatter, wait
from .moves import Move, join, local_move, split


def needs_detour(move: Move, x: torch.Tensor) -> bool:
    """An all-to-all within one dimension (between different `parts`) goes by way of a gather."""
    return move.kind == "all_to_all" and move.dim % x.dim() == move.to % x.dim()


def _rows(move: Move, x: torch.Tensor, size: int) -> torch.Tensor:
    """The layout that the collective reads, ``[rows, k]``."""
    if move.kind == "reduce_scatter":
        return split(x, move.dim, move.parts, size).reshape(size, -1)
    if move.kind == "all_to_all" and not needs_detour(move, x):
        return split(x, move.to, move.to_parts, size).reshape(size, -1)
    return x.reshape(1, -1)


def _shape(move: Move, x: torch.Tensor, size: int) -> list[int]:
    """The shape of one arriving row."""
    shape = list(x.shape)
    if move.kind == "reduce_scatter":
        shape[move.dim] //= size
    if move.kind == "all_to_all" and not needs_detour(move, x):
        shape[move.to] //= size
    return shape


def _communicate(kind: str, op: str, flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    if kind == "all_reduce":
        return all_reduce(flat, op, group)
    if kind == "reduce_scatter":
        return reduce_scatter(flat, op, size, group)
    if kind == "all_to_all":
        return all_to_all(flat, size, group)
    return all_gather(flat, size, group)


def _kind(move: Move, x: torch.Tensor) -> str:
    return "gather" if needs_detour(move, x) else move.kind


def _together(moves: Sequence[Move], xs: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the communicating tensors that share a collective: same kind, reduction and dtype."""
    groups: dict[tuple[str, str, torch.dtype], list[int]] = {}
    for index, (move, x) in enumerate(zip(moves, xs, strict=True)):
        if move.communicates:
            groups.setdefault((_kind(move, x), move.op, x.dtype), []).append(index)
    return list(groups.values())


def launch(moves: Sequence[Move], xs: Sequence[torch.Tensor], size: int, group: str) -> list[torch.Tensor]:
    """One flat tensor on its way per bucket."""
    raws = []
    for indices in _together(moves, xs):
        rows = [_rows(moves[i], xs[i], size) for i in indices]
        flat = (rows[0] if len(rows) == 1 else torch.cat(rows, 1)).contiguous()
        first = moves[indices[0]]
        raws.append(_communicate(_kind(first, xs[indices[0]]), first.op, flat.view(-1), size, group))
    return raws


def land(
    moves: Sequence[Move], xs: Sequence[torch.Tensor], raws: Sequence[torch.Tensor], size: int, coordinate: int
) -> list[torch.Tensor]:
    """The results in the order of `xs`, whose values are read only by moves that need no communication."""
    out: list[torch.Tensor | None] = [None] * len(xs)
    for index, (move, x) in enumerate(zip(moves, xs, strict=True)):
        if not move.communicates:
            out[index] = local_move(move, x, size, coordinate)
    for indices, raw in zip(_together(moves, xs), raws, strict=True):
        rows = size if _kind(moves[indices[0]], xs[indices[0]]) in ("gather", "all_to_all") else 1
        arrived = wait(raw).view(rows, -1)
        offset = 0
        for i in indices:
            shape = _shape(moves[i], xs[i], size)
            width = prod(shape)
            part = arrived if len(indices) == 1 else arrived.narrow(1, offset, width)
            offset += width
            out[i] = _assemble(moves[i], xs[i], part.reshape(rows, *shape), size, coordinate)
    return [x for x in out if x is not None]


def _assemble(move: Move, x: torch.Tensor, stacked: torch.Tensor, size: int, coordinate: int) -> torch.Tensor:
    if move.kind in ("all_reduce", "reduce_scatter"):
        return stacked.squeeze(0)
    whole = join(stacked, move.dim, move.parts)
    if needs_detour(move, x):
        return local_move(Move("slice", move.to, move.to_parts), whole, size, coordinate)
    return whole
