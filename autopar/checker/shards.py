"""Types of tensors on the axes of a mesh: what of the global tensor a rank holds, and where its gradient is.

On each axis a tensor is cut (`Cut`), or of a kind:

| kind | values on the ranks of the axis | gradients on these ranks |
|---|---|---|
| `Cut` | parts of a dimension | the same parts |
| ``R`` replicated | equal | summands |
| ``I`` invariant | equal | equal |
| ``P`` partial | summands | equal |
| ``Pmax``, ``Pmin`` | their maximum, minimum is the value | none |

A cut is a digit of the index. The global index of the dimension is written with the digits ``(outer, rank, inner)``: a rank has
all elements whose middle digit is its coordinate. So the cuts of several axes need no order, and a reshape, which keeps the flat
index, keeps cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from autopar.errors import AutoparError
from autopar.ir.placement import Partial, Shard, parse_placement

MICRO = "micro-batches"
"""The axis of time: micro-batches are shards of the batch, and what adds up over them is partial."""


class NotProven(AutoparError):
    """A claim that the checker could not derive: the line of the program, and what is wrong there."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.line, self.reason = line, reason


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank holds runs of `inner` consecutive elements of dimension `dim`, every (axis size x inner)-th of them."""

    dim: int
    inner: int

    def __str__(self) -> str:
        return f"cut({self.dim}, runs of {self.inner})"


Kind = Cut | str
Kinds = tuple[Kind, ...]
"""One for each axis, in the order of `Axes`."""
Shape = tuple[int, ...]
REPLICATED, INVARIANT, PARTIAL = "R", "I", "P"


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh axes that have more than one rank, and the axis of micro-batches where there are several."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mapping[str, int], micro_batches: int) -> Axes:
        pairs = [(name, size) for name, size in (*mesh.items(), (MICRO, micro_batches)) if size > 1]
        return Axes(tuple(name for name, _ in pairs), tuple(size for _, size in pairs))

    def all(self, kind: Kind) -> Kinds:
        return (kind,) * len(self.names)

    def local_shape(self, shape: Shape, kinds: Kinds) -> Shape | None:
        """The shape on one rank; None where the cuts are not digits of one index."""
        out = list(shape)
        for dim in {kind.dim for kind in kinds if isinstance(kind, Cut)}:
            if not 0 <= dim < len(shape):
                return None
            below = 1
            for inner, size in sorted(self.digits(kinds, dim)):
                if inner % below:
                    return None
                below = inner * size
            if shape[dim] % below:
                return None
            out[dim] //= self.ranks(kinds, dim)
        return tuple(out)

    def digits(self, kinds: Kinds, dim: int) -> list[tuple[int, int]]:
        """(inner, axis size) of all cuts of a dimension."""
        return [(k.inner, n) for k, n in zip(kinds, self.sizes, strict=True) if isinstance(k, Cut) and k.dim == dim]

    def ranks(self, kinds: Kinds, dim: int) -> int:
        """Over how many ranks all axes together cut a dimension."""
        return prod(size for _, size in self.digits(kinds, dim))

    def placed(self, shape: Shape, places: Mapping[str, str], otherwise: Mapping[str, Kind]) -> Kinds:
        """The kinds of placements as a program writes them for whole tensors, in the order of the mesh: of two axes that shard
        one dimension in equal parts, the later one shards the chunks of the earlier. ValueError for what is none."""
        for text in places.values():  # those on axes of one rank too
            place = parse_placement(text)
            if isinstance(place, Shard) and not -len(shape) <= place.dim < len(shape):
                raise ValueError(f"a tensor of {len(shape)} dimensions cannot be {text}")
        above: dict[tuple[int, int], int] = {}
        out: list[Kind] = []
        for name, size in zip(self.names, self.sizes, strict=True):
            if name not in places:
                out.append(otherwise[name])
                continue
            place = parse_placement(places[name])
            if isinstance(place, Shard):
                dim = place.dim % len(shape)
                key = dim, place.parts
                above[key] = above.get(key, place.parts) * size
                if shape[dim] % above[key]:
                    raise ValueError(f"a tensor of shape {list(shape)} cannot be {places[name]} on {name}")
                out.append(Cut(dim, shape[dim] // above[key]))
            else:
                out.append(f"P{place.op}" if isinstance(place, Partial) and place.op != "sum" else str(place))
        return tuple(out)


def words_of(text: str) -> list[str]:
    return text.split()


def equal_kind(kind: Kind) -> bool:
    """Whether all ranks of the axis hold the same values."""
    return kind in (REPLICATED, INVARIANT)


def alike(kinds: Kinds, others: Kinds) -> bool:
    """Return whether a rank holds the same of one tensor as of the other; their gradients may differ."""
    return all(a == b or (equal_kind(a) and equal_kind(b)) for a, b in zip(kinds, others, strict=True))


def words(axes: Axes, kinds: Iterable[Kind]) -> str:
    """``dp: cut(0, runs of 4), tp: P``."""
    return ", ".join(f"{name}: {kind}" for name, kind in zip(axes.names, kinds, strict=True)) or "whole"
