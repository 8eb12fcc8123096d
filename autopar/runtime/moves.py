"""What a placement change does on one mesh axis: its text, its forward move and the exact dual for the gradient.

| from -> to | forward | backward |
|---|---|---|
| S -> R | gather | reduce_scatter |
| S -> I | gather | slice |
| S(d) -> S(e) | all_to_all | all_to_all |
| P -> R | all_reduce | all_reduce |
| P -> I | all_reduce | none |
| P -> S | reduce_scatter | gather |
| I -> R | none | all_reduce |
| I -> S | slice | gather |
| R -> S | slice | pad |
| R -> I | none | scale |
| I -> P | mask | none |
| R -> P | mask | mask |
| S -> P | pad | slice |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .compat import alias

COMMUNICATING = ("gather", "reduce_scatter", "all_to_all", "all_reduce")


class Move(NamedTuple):
    """One step on an axis. `dim, parts` is where the shard is; `to, to_parts` where an all-to-all puts it; `op` reduces."""

    kind: str
    dim: int = 0
    parts: int = 1
    to: int = 0
    to_parts: int = 1
    op: str = "sum"

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATING


NONE = Move("none")

# (letter of the source, of the target) -> kinds of the forward and the backward move
_TABLE = {
    "SR": ("gather", "reduce_scatter"),
    "SI": ("gather", "slice"),
    "PR": ("all_reduce", "all_reduce"),
    "PI": ("all_reduce", "none"),
    "PS": ("reduce_scatter", "gather"),
    "IR": ("none", "all_reduce"),
    "IS": ("slice", "gather"),
    "RS": ("slice", "pad"),
    "RI": ("none", "scale"),
    "IP": ("mask", "none"),
    "RP": ("mask", "mask"),
    "SP": ("pad", "slice"),
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator, unused-ignore]
def parse(text: str) -> tuple[Move, Move]:
    """``"S(1) -> R"`` as its forward and backward moves. ValueError for a text that is not a conversion."""
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Move, Move]:
    source, arrow, target = text.partition(" -> ")
    if not arrow:
        raise ValueError(f"{text!r} is not a conversion; write for example 'S(1) -> R'")
    if source == target:
        return NONE, NONE
    (a, dim, parts, op), (b, to, to_parts, to_op) = _placement(source), _placement(target)
    if a == b == "S":
        return Move("all_to_all", dim, parts, to, to_parts), Move("all_to_all", to, to_parts, dim, parts)
    if a + b not in _TABLE or (b == "P" and to_op != "sum"):
        raise ValueError(f"there is no conversion {text!r}")
    where = (dim, parts) if a == "S" else (to, to_parts)
    forward, backward = _TABLE[a + b]
    return Move(forward, *where, op=op), Move(backward, *where)


def _placement(text: str) -> tuple[str, int, int, str]:
    """Letter, dim, parts and reduction of one placement."""
    letter, inner = text[:1], text[2:-1]
    if text in ("R", "I", "P"):
        return letter, 0, 1, "sum"
    if letter == "P" and inner in ("sum", "max", "min"):
        return letter, 0, 1, inner
    if letter == "S" and text[1:2] == "(" and text[-1:] == ")":
        dim, _, parts = inner.partition(",")
        return letter, int(dim), int(parts or 1), "sum"
    raise ValueError(f"{text!r} is not a placement; write S(dim), S(dim,parts), R, I, P, P(max) or P(min)")


def result_shape(move: Move, shape: Sequence[int], size: int) -> list[int]:
    """The shape that a move makes of `shape`."""
    out = list(shape)
    if move.kind in ("gather", "all_to_all", "pad"):
        out[move.dim] *= size
    if move.kind in ("reduce_scatter", "slice"):
        out[move.dim] //= size
    if move.kind == "all_to_all":
        out[move.to] //= size
    return out


def split(x: torch.Tensor, dim: int, parts: int, size: int) -> torch.Tensor:
    """``[size, *local shape]``: what each rank of the axis would hold of `x` under S(dim, parts), not yet contiguous."""
    dim %= x.dim()
    shape = x.shape
    minor = shape[dim] // (parts * size)
    apart = x.reshape(*shape[:dim], parts, size, minor, *shape[dim + 1 :])
    return apart.movedim(dim + 1, 0).reshape(size, *shape[:dim], parts * minor, *shape[dim + 1 :])


def join(stacked: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The inverse of `split`."""
    size, shape = stacked.shape[0], stacked.shape[1:]
    dim %= len(shape)
    minor = shape[dim] // parts
    apart = stacked.reshape(size, *shape[:dim], parts, minor, *shape[dim + 1 :])
    return apart.movedim(0, dim + 1).reshape(*shape[:dim], parts * size * minor, *shape[dim + 1 :])


def chunk(x: torch.Tensor, dim: int, parts: int, size: int, coordinate: int) -> torch.Tensor:
    """What rank `coordinate` holds of `x` under S(dim, parts). A view where the layout allows it."""
    dim %= x.dim()
    shape = x.shape
    local = shape[dim] // size
    if parts == 1:
        return x.narrow(dim, coordinate * local, local)
    apart = x.reshape(*shape[:dim], parts, size, local // parts, *shape[dim + 1 :])
    return apart.select(dim + 1, coordinate).reshape(*shape[:dim], local, *shape[dim + 1 :])


def local_move(move: Move, x: torch.Tensor, size: int, coordinate: int) -> torch.Tensor:
    """A move that needs no communication. Only ``none`` gives a view."""
    if move.kind == "none":
        return alias(x)
    if move.kind == "slice":  # a copy: a view, kept for the backward, would keep the whole
        piece = chunk(x, move.dim, move.parts, size, coordinate)
        return piece if move.parts > 1 else piece.clone(memory_format=torch.contiguous_format)
    if move.kind == "scale":
        return x / size
    if move.kind == "mask":  # new on every rank: what is a view of what must not differ between ranks (see `again`)
        return x.clone() if coordinate == 0 else torch.zeros_like(x)
    assert move.kind == "pad", move.kind
    dim = move.dim % x.dim()
    whole = x.new_zeros((*x.shape[:dim], size, *x.shape[dim:]))
    whole.select(dim, coordinate).copy_(x)
    return join(whole.movedim(dim, 0), dim, move.parts)
