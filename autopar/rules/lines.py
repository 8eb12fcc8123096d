"""Words for lines that are written from shapes, and readers of dimension arguments."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.dims import Dim
from autopar.ir.graph import Node
from autopar.rules.rule import argument


def letter(index: int) -> str:
    """The name of the factor of dimension `index` in a derived line."""
    return "abcdefghijklmnopqrstuvwxyz"[index]


def fixed(size: Dim) -> str:
    """The word of a dimension that is left alone."""
    return str(size) if isinstance(size, int) else "0"


def words(terms: Iterable[str]) -> str:
    """One tensor of a line."""
    return " ".join(terms) or "()"


def line(operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]]) -> str:
    """A line from the words of its tensors."""
    return f"{', '.join(map(words, operands))} -> {', '.join(map(words, results))}"


def integers(node: Node, index: int, name: str, rank: int) -> tuple[int, ...]:
    """An argument that is one dimension, a tuple of them, or absent (all), as non-negative numbers."""
    found = argument(node, index, name)
    if found is None or found == ():
        return tuple(range(rank))
    items = found if isinstance(found, tuple) else (found,)
    return tuple(int(item) % max(rank, 1) for item in items)  # type: ignore[arg-type]


def dimension(node: Node, index: int, rank: int, default: int = 0, name: str = "dim") -> int:
    """An argument that is one dimension, as a non-negative number."""
    found = argument(node, index, name, default)
    assert isinstance(found, int)
    return found % max(rank, 1)
