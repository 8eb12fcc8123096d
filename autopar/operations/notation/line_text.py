"""Helpers for rules whose line depends on shapes: they write the words of a line, and read arguments that are dimensions."""

from __future__ import annotations

from collections.abc import Container, Iterable

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Node
from autopar.operations.notation.rule import DerivedLine, argument


def letter(index: int) -> str:
    """The name of the factor of dimension `index` in a derived line."""
    return "abcdefghijklmnopqrstuvwxyz"[index]


def fixed(size: Dim) -> str:
    """The word of a dimension that is never sharded."""
    return str(size) if isinstance(size, int) else "0"


def words(shape: Shape, whole: Container[int] = ()) -> list[str]:
    """Each dimension of a tensor as a factor of its own, but for those that are never sharded."""
    return [fixed(size) if dim in whole else letter(dim) for dim, size in enumerate(shape)]


def except_dims(dims: Container[int], node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """All dimensions but `dims`, of operands and results alike."""
    return DerivedLine(line_text((words(shape, dims) for shape in shapes), (words(value.shape, dims) for value in node.outputs)))


def tensor_text(terms: Iterable[str]) -> str:
    """One tensor of a line, from the words of its dimensions."""
    return " ".join(terms) or "()"


def line_text(operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]]) -> str:
    """A line, from the words of the dimensions of its tensors."""
    return f"{', '.join(map(tensor_text, operands))} -> {', '.join(map(tensor_text, results))}"


def dims_argument(node: Node, index: int, name: str, rank: int) -> tuple[int, ...]:
    """The non-negative dimensions of an argument that is one dimension, a tuple, or absent (all dimensions)."""
    found = argument(node, index, name)
    if found is None or found == ():
        return tuple(range(rank))
    items = found if isinstance(found, tuple) else (found,)
    return tuple(int(item) % max(rank, 1) for item in items)  # type: ignore[arg-type]


def dim_argument(node: Node, index: int, rank: int, default: int = 0, name: str = "dim") -> int:
    """The non-negative dimension of an argument."""
    found = argument(node, index, name, default)
    assert isinstance(found, int)
    return found % max(rank, 1)


def leading_dims(count: int, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """The first `count` dimensions (all but the last, if negative) of the first operand and the results; other operands are never
    sharded."""
    leading = [letter(i) for i in range(len(shapes[0]))][:count]
    operands = [[*leading, *map(fixed, shapes[0][count:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    return DerivedLine(line_text(operands, ([*leading, *map(fixed, value.shape[count:])] for value in node.outputs)))
