"""Where a tensor is on one mesh axis: sharded, replicated, invariant or partial.

`Replicate` and `Invariant` both mean "equal on every rank of the axis"; they differ in their gradients. The gradient of a
`Replicate` value is `Partial` (each rank holds a summand), the gradient of an `Invariant` value is `Invariant` (each rank
holds the whole). `Partial`'s gradient is `Replicate`-like (equal everywhere), `Shard`'s is `Shard`.

Values that carry no gradient (integers, masks) are never `Invariant`: for them `Replicate` is the one spelling.

Text forms: ``S(1)``, ``S(1,3)``, ``R``, ``I``, ``P``, ``P(max)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.dims import Dim, divide, divisible


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension `dim` is cut over the axis.

    With `parts` > 1 the dimension is read as ``(parts, size / parts)``, row-major, and the *minor* part is cut: rank r holds
    chunk r of each of the `parts` pieces. A fused query-key-value projection sharded by heads is ``S(0,3)``; a flattened
    ``batch x sequence`` dimension sharded by sequence is ``S(0,B)`` in spirit (only integer parts are expressible).
    """

    dim: int
    parts: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.parts == 1 else f"S({self.dim},{self.parts})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Equal values; the gradient is a sum over the axis."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Invariant:
    """Equal values whose gradients are equal too."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction over the axis of what the ranks hold. `op` is sum, max or min (no gradient through max, min)."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


Placement = Shard | Replicate | Invariant | Partial
Placements = tuple[Placement, ...]
"""One placement per mesh axis, in the order of the mesh's axes."""

_SHARD = re.compile(r"S\((-?\d+)(?:,(\d+))?\)")
_PARTIAL = re.compile(r"P(?:\((sum|max|min)\))?")


def parse_placement(text: str) -> Placement:
    """The inverse of ``str``. ValueError on anything else."""
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
    """``S(0) R`` for one placement per axis, separated by blanks."""
    return " ".join(map(str, placements))


def parse_placements(text: str) -> Placements:
    """The inverse of `format_placements`."""
    return tuple(parse_placement(word) for word in text.split())


def local_shape(shape: Sequence[Dim], placements: Placements, axis_sizes: Sequence[int]) -> tuple[Dim, ...]:
    """The shape of one rank's part. ValueError where a sharded dimension does not divide."""
    out = list(shape)
    for placement, size in zip(placements, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            out[placement.dim] = divide(out[placement.dim], size)
    return tuple(out)


def can_shard(shape: Sequence[Dim], placements: Placements, axis_sizes: Sequence[int]) -> bool:
    """Whether every sharded dimension divides, and every two shardings of one dimension nest.

    Two axes may cut the same dimension when their `parts` are equal (the later axis cuts within the earlier one's chunk), or
    when the one has ``parts == 1`` and comes first, cutting whole parts of the other (``other.parts % size == 0``).
    """
    seen: dict[int, list[tuple[int, int]]] = {}
    for placement, size in zip(placements, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            seen.setdefault(placement.dim, []).append((placement.parts, size))
    for dim, cuts in seen.items():
        if not -len(shape) <= dim < len(shape):
            return False
        extent: Dim = shape[dim]
        cut_of: dict[int, int] = {}
        for parts, size in cuts:
            cut_of[parts] = cut_of.get(parts, 1) * size
        if len(cut_of) > 2 or (len(cut_of) == 2 and 1 not in cut_of):
            return False
        if len(cut_of) == 2:
            if cuts[0][0] != 1 or [parts for parts, _ in cuts] != sorted(parts for parts, _ in cuts):
                return False
            minor = max(cut_of)
            if minor % cut_of[1]:
                return False
        for parts, cut in cut_of.items():
            if parts == 1 and len(cut_of) == 2:
                continue
            if not divisible(extent, parts * cut):
                return False
    return True


def local_parts(placements: Placements, axis_sizes: Sequence[int], axis: int) -> int:
    """How many parts axis `axis`'s sharding sees in the *local* tensor of the other axes: `parts` over cuts of whole parts."""
    mine = placements[axis]
    assert isinstance(mine, Shard)
    parts = mine.parts
    for other, (placement, size) in enumerate(zip(placements, axis_sizes, strict=True)):
        if other != axis and isinstance(placement, Shard) and placement.dim == mine.dim and placement.parts < mine.parts:
            parts //= size
    return parts
