"""The placement conversions on one mesh axis: the text of each, the operation of the forward, and its dual for the gradient.

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
from torch.distributed.tensor import Replicate, Shard

from ..compat.autograd import alias

COMMUNICATING = ("gather", "reduce_scatter", "all_to_all", "all_reduce")


class AxisOperation(NamedTuple):
    """One direction of a conversion: a collective, or a local operation. `dim, parts`: the shard that it reads or makes;
    `to, to_parts`: the shard that an all-to-all makes; `op`: the reduction."""

    kind: str
    dim: int = 0
    parts: int = 1
    to: int = 0
    to_parts: int = 1
    op: str = "sum"

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATING

    @property
    def differs_by_rank(self) -> bool:
        """True where the result depends on the coordinate of the rank."""
        return self.kind in ("slice", "mask", "pad")


NO_OPERATION = AxisOperation("none")

# (letter of the source, of the target) -> kinds of the forward operation and of its dual
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
def parse_conversion(text: str) -> tuple[AxisOperation, AxisOperation]:
    """Return a text such as ``"S(1) -> R"`` as its forward operation and the dual of it. ValueError for a text that is not a
    conversion."""
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[AxisOperation, AxisOperation]:
    source, arrow, target = text.partition(" -> ")
    if not arrow:
        raise ValueError(f"{text!r} is not a conversion; write for example 'S(1) -> R'")
    if source == target:
        return NO_OPERATION, NO_OPERATION
    (a, dim, parts, op), (b, to, to_parts, to_op) = _placement(source), _placement(target)
    if a == b == "S":
        return AxisOperation("all_to_all", dim, parts, to, to_parts), AxisOperation("all_to_all", to, to_parts, dim, parts)
    if a + b not in _TABLE or (b == "P" and to_op != "sum"):
        raise ValueError(f"there is no conversion {text!r}")
    where = (dim, parts) if a == "S" else (to, to_parts)
    forward, backward = _TABLE[a + b]
    return AxisOperation(forward, *where, op=op), AxisOperation(backward, *where)


def _placement(text: str) -> tuple[str, int, int, str]:
    """Letter, dim, parts and reduction of one placement."""
    letter, inner = text[:1], text[2:-1]
    if text in ("R", "I", "P"):
        return letter, 0, 1, "sum"
    if letter == "P" and inner in ("sum", "max", "min"):
        return letter, 0, 1, inner
    if text[-1:] == ")" and (shard := shard_of(text)) is not None:
        return letter, *shard, "sum"
    raise ValueError(f"{text!r} is not a placement; write S(dim), S(dim,parts), R, I, P, P(max) or P(min)")


def shard_of(text: str) -> tuple[int, int] | None:
    """Return the dimension and the parts of ``S(dim)`` or ``S(dim,parts)``; None for any other placement."""
    if not text.startswith("S("):
        return None
    dim, _, parts = text[2:-1].partition(",")
    return int(dim), int(parts or 1)


def dtensor_placement(text: str) -> Shard | Replicate:
    """Return DTensor's placement for a shard of one part, or for anything that is equal on all ranks."""
    shard = shard_of(text)
    return Replicate() if shard is None else Shard(shard[0])


def result_shape(operation: AxisOperation, shape: Sequence[int], size: int) -> list[int]:
    """The local shape after the operation."""
    out = list(shape)
    if operation.kind in ("gather", "all_to_all", "pad"):
        out[operation.dim] *= size
    if operation.kind in ("reduce_scatter", "slice"):
        out[operation.dim] //= size
    if operation.kind == "all_to_all":
        out[operation.to] //= size
    return out


def split_shards(x: torch.Tensor, dim: int, parts: int, size: int) -> torch.Tensor:
    """Return ``[size, *local shape]``: what each rank of the axis would hold of `x` under S(dim, parts), not yet contiguous."""
    dim %= x.dim()
    shape = x.shape
    minor = shape[dim] // (parts * size)
    apart = x.reshape(*shape[:dim], parts, size, minor, *shape[dim + 1 :])
    return apart.movedim(dim + 1, 0).reshape(size, *shape[:dim], parts * minor, *shape[dim + 1 :])


def join_shards(stacked: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The inverse of `split`."""
    size, shape = stacked.shape[0], stacked.shape[1:]
    dim %= len(shape)
    minor = shape[dim] // parts
    apart = stacked.reshape(size, *shape[:dim], parts, minor, *shape[dim + 1 :])
    return apart.movedim(0, dim + 1).reshape(*shape[:dim], parts * size * minor, *shape[dim + 1 :])


def local_shard(x: torch.Tensor, dim: int, parts: int, size: int, coordinate: int | torch.Tensor) -> torch.Tensor:
    """Return the shard of `x` that rank `coordinate` holds under S(dim, parts). A view where the layout allows it, and a copy of
    a coordinate that is a tensor."""
    dim %= x.dim()
    shape = x.shape
    local = shape[dim] // size
    if parts == 1 and not isinstance(coordinate, torch.Tensor):
        return x.narrow(dim, coordinate * local, local)
    apart = x.reshape(*shape[:dim], parts, size, local // parts, *shape[dim + 1 :])
    if isinstance(coordinate, torch.Tensor):
        own = apart.index_select(dim + 1, coordinate.view(1))
    else:
        own = apart.select(dim + 1, coordinate)
    return own.reshape(*shape[:dim], local, *shape[dim + 1 :])


def apply_locally(operation: AxisOperation, x: torch.Tensor, size: int, coordinate: int | torch.Tensor) -> torch.Tensor:
    """An operation that needs no communication. Only ``none`` returns a view. With a coordinate that is a tensor it is one graph
    for all ranks."""
    if operation.kind == "none":
        return alias(x)
    if operation.kind == "slice":  # a copy: a view that is saved for the backward would keep the whole storage
        shard = local_shard(x, operation.dim, operation.parts, size, coordinate)
        is_copy = operation.parts > 1 or isinstance(coordinate, torch.Tensor)
        return shard if is_copy else shard.clone(memory_format=torch.contiguous_format)
    if operation.kind == "scale":
        return x / size
    if operation.kind == "mask":
        # a new tensor, and one that reads x, on every rank: where some ranks read what a collective brings and others do not,
        # torch.compile repeats that collective in the backward on the former alone
        other = coordinate != 0
        return x.masked_fill(other if isinstance(other, torch.Tensor) else x.new_full((), other, dtype=torch.bool), 0)
    assert operation.kind == "pad", operation.kind
    dim = operation.dim % x.dim()
    if isinstance(coordinate, torch.Tensor):
        ranks = torch.arange(size, device=x.device).view(size, *[1] * (x.dim() - dim))
        whole = torch.where(ranks == coordinate, x.unsqueeze(dim), x.new_zeros(()))
    else:
        whole = x.new_zeros((*x.shape[:dim], size, *x.shape[dim:]))
        whole.select(dim, coordinate).copy_(x)
    return join_shards(whole.movedim(dim, 0), dim, operation.parts)
