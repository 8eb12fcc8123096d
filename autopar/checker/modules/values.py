"""The kinds of a recorded tensor: its content on ranks, and the kind that a collective makes of it.

Values on the ranks of an axis are equal (``R``), summands of the value (``P``; of a maximum ``Pmax``), parts along a dimension
(`Cut`, with runs of local elements), or differ in a way that no row knows (``V``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.checker.modules.recording import Made, RecordedLine, WrongLine
from autopar.checker.shards import PARTIAL, REPLICATED, Cut, Kind

VARYING = "V"


@dataclass(frozen=True, slots=True)
class RankValue:
    """The content of a tensor on each axis of ranks, and the line since which it is so. `repeats`: dimensions along which all
    elements are alike or made of numbers, so that equal values are any part of themselves. `zero`: a summand of itself too.
    `counts`: the numbers from 0, which as an index name each row of what a rank has."""

    kinds: tuple[Kind, ...]
    since: tuple[str, ...]
    repeats: frozenset[int] = frozenset()
    number: bool = False
    zero: bool = False
    counts: bool = False


@dataclass(frozen=True, slots=True)
class RankDifference:
    """The part of a line that differs along an axis: operands, of which each rank takes a part; or (`results`) its numbers, and
    what they make of operands that are equal."""

    operands: Mapping[int, Kind]
    results: Kind | None = None


def collective(line: RecordedLine, name: str, size: int, value: RankValue, kind: Kind, made: Made, axis: int) -> Kind:
    """The kind of a collective's result on the axis `name` of `size` ranks. WrongLine where it is not for such values."""
    what, reduces = f"{line.op} over {name}", line.op in ("all_reduce", "reduce_scatter")
    reduction = str(line.arguments["reduce"]) if reduces else ""
    wanted = {"sum": PARTIAL, "avg": PARTIAL, "max": "Pmax", "min": "Pmin"}.get(reduction)
    if partial(kind) and kind != wanted:
        raise WrongLine(line.source, f"{what} takes a value that is {word(kind)} there{since(value, axis)}")
    if isinstance(kind, Cut) and (reduces or line.op == "broadcast"):
        raise WrongLine(line.source, f"{what} mixes the shards of dimension {kind.dim}{since(value, axis)}")
    counted = value.number and not line.backward  # a number of each rank, such as how many tokens it has
    if kind == REPLICATED and reduction == "sum" and not counted:
        raise WrongLine(line.source, f"{what} adds up values that are equal on its {size} ranks: {size} times too large")
    if line.op == "reduce_scatter":
        return Cut(0, made.shape[0])
    if line.op != "all_to_all":
        return REPLICATED
    return Cut(0, made.shape[0] // size) if isinstance(kind, Cut) else VARYING


def partial(kind: Kind) -> bool:
    """Return whether ranks hold summands, or what their maximum or minimum is to be taken of."""
    return isinstance(kind, str) and kind.startswith("P")


def word(kind: Kind) -> str:
    """A kind in words, for a message."""
    words = {"R": "equal", "V": "different on each rank", "P": "partial"}
    return f"cut along dimension {kind.dim}" if isinstance(kind, Cut) else words.get(kind, kind)


def since(value: RankValue, axis: int) -> str:
    """Where a value became what it is, for a message."""
    return f" (since {value.since[axis]})" if value.since[axis] else ""
