"""Placements of a tensor on one mesh axis, as in DTensor: Shard, Replicate, Partial; and Invariant.

`Replicate` and `Invariant` both mean that the values are equal on every rank of the axis; their gradients differ. The gradient of
a `Replicate` value is `Partial` (each rank holds a summand), that of an `Invariant` value is `Invariant` (each rank holds all of
it). The gradient of `Partial` is equal on all ranks, that of `Shard` is `Shard`.

Values without gradient (integers, masks) are never `Invariant`; they are `Replicate`.

Text forms: ``S(1)``, ``S(1,3)``, ``R``, ``I``, ``P``, ``P(max)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.dims import Dim, divide, divisible


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension `dim` is sharded over the axis.

    With `parts` > 1 the dimension is viewed as ``(parts, size / parts)``, row-major, and the *minor* one is sharded: rank r holds
    the r-th chunk of each part. A fused query-key-value projection sharded by heads is ``S(0,3)``. `parts` is a number: a
    flattened ``batch x sequence`` dimension that is sharded by sequence would need ``S(0,B)``, which does not exist.
    """

    dim: int
    parts: int = 1

    def __hash__(self) -> int:  # millions of look-ups of placements in one search: a third less than of a tuple of fields
        return 31 * self.dim + self.parts

    def __str__(self) -> str:
        return f"S({self.dim})" if self.parts == 1 else f"S({self.dim},{self.parts})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Equal values on all ranks; the gradient is a sum over the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Invariant:
    """Equal values on all ranks, whose gradients are equal too."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction (`op`: sum, max, min) over the axis of what the ranks hold. No gradient through max and min."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Shard | Replicate | Invariant | Partial
Placements = tuple[Placement, ...]
"""One placement per mesh axis, in the order of the mesh's axes."""

_SHARD = re.compile(r"S\((-?\d+)(?:,(\d+))?\)")
_PARTIAL = re.compile(r"P(?:\((sum|max|min)\))?")


def parse_placement(text: str) -> Placement:
    """The placement of a text form (see above). ValueError on anything else."""
    if text == "R":
        return Replicate()
    if text == "I":
        return Invariant()
    if match := _SHARD.fullmatch(text):
        return Shard(int(match[1]), int(match[2] or 1))
    if match := _PARTIAL.fullmatch(text):
        return Partial(match[1] or "sum")
    raise ValueError(f"{text!r} is not a placement; write S(dim), S(dim,parts), R, I, P, P(max) or P(min)")


def format_placements(placements: Placements) -> str:
    """The text of one placement per axis, separated by blanks: ``S(0) R``."""
    return " ".join(map(str, placements))


def parse_placements(text: str) -> Placements:
    """The inverse of `format_placements`."""
    return tuple(parse_placement(word) for word in text.split())


def local_shape(shape: Sequence[Dim], placements: Placements, axis_sizes: Sequence[int]) -> tuple[Dim, ...]:
    """The shape of the local shard of one rank. ValueError where a sharded dimension does not divide."""
    out = list(shape)
    for placement, size in zip(placements, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            out[placement.dim] = divide(out[placement.dim], size)
    return tuple(out)


def can_shard(shape: Sequence[Dim], placements: Placements, axis_sizes: Sequence[int]) -> bool:
    """Return whether every sharded dimension divides, and all shardings of one dimension nest.

    Two axes may shard the same dimension when their `parts` are equal (the later axis shards the chunks of the earlier one), or
    when the earlier one has ``parts == 1`` and takes whole parts of the other (``other.parts % size == 0``).
    """
    shardings: dict[int, list[tuple[int, int]]] = {}
    for placement, size in zip(placements, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            shardings.setdefault(placement.dim, []).append((placement.parts, size))
    return all(-len(shape) <= dim < len(shape) and _shardings_nest(shape[dim], each) for dim, each in shardings.items())


def _shardings_nest(extent: Dim, shardings: Sequence[tuple[int, int]]) -> bool:
    """Return whether a dimension of `extent` can be sharded by these (parts, axis size), in the order of the axes."""
    ranks_of: dict[int, int] = {}
    for parts, size in shardings:
        ranks_of[parts] = ranks_of.get(parts, 1) * size
    if len(ranks_of) == 1:
        ((parts, ranks),) = ranks_of.items()
        return divisible(extent, parts * ranks)
    if len(ranks_of) > 2 or 1 not in ranks_of:
        return False
    in_order = [parts for parts, _ in shardings]
    minor = max(ranks_of)
    return in_order == sorted(in_order) and minor % ranks_of[1] == 0 and divisible(extent, minor * ranks_of[minor])


def local_parts(placements: Placements, axis_sizes: Sequence[int], axis: int) -> int:
    """The `parts` of the sharding on axis `axis` in the tensor that is local on all other axes: other axes that take whole parts
    of the same dimension divide them."""
    own = placements[axis]
    assert isinstance(own, Shard)
    parts = own.parts
    for other, (placement, size) in enumerate(zip(placements, axis_sizes, strict=True)):
        if other != axis and isinstance(placement, Shard) and placement.dim == own.dim and placement.parts < own.parts:
            parts //= size
    return parts
