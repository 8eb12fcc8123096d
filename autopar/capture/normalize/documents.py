"""Recognizes masks of packed sequences: attention within documents, whose mask says that a query and a key are of one document
and that the key does not come after the query.

``document[row] == document[column]`` of numbers ``[B or 1, S]``, under a causal band or ``position[column] <= position[row]``
(position ids that restart, as transformers reads them): flex attention with a document mask and transformers' packed batches have
this form, and a sliding window in either. The numbers become operands of the attention, and no tensor has the size of the scores.
Keys that no query may see (padding, ``[B or 1, 1, 1, T]``) become keys of other documents: those of queries are even, theirs odd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.capture.flat import node_like, size_args
from autopar.capture.normalize.masks import WHOLE, MaskReader, conditions
from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node, Ref
from autopar.operations.factories import ARANGE

_EQUAL = ("aten.eq.Tensor",)
_AT_MOST = ("aten.le.Tensor",)
_AT_LEAST = ("aten.ge.Tensor",)
_BELOW, _ABOVE = ("aten.lt.Tensor",), ("aten.gt.Tensor",)
_INTEGERS = ("int64", "int32", "bool")

Pair = tuple[str, str]
"""A value by rows ``[B or 1, 1, S, 1]`` and one by columns ``[B or 1, 1, 1, T]``; or both without the second dimension."""


@dataclass(frozen=True, slots=True)
class DocumentMask:
    """The numbers of documents, and the positions of queries and keys where they are data; else a band by position `causal`, of
    `window` keys before a query where there is one. `visible` are conditions of keys alone. The mask that was read has `rank`
    dimensions."""

    documents: Pair
    positions: Pair | None
    causal: bool
    rank: int
    window: int | None = None
    visible: tuple[str, ...] = ()


def document_mask(reader: MaskReader, name: str) -> DocumentMask | None:
    """Return the form of a mask, None where it is no mask of documents."""
    inside = _without_heads(reader, name)
    found, rank = conditions(reader, inside), 4 if inside == name else 3
    if found is None:
        return None
    equal = [pair for leaf in found.others if (pair := _compared(reader, leaf, rank, _EQUAL, ()))]
    ordered = [pair for leaf in found.others if (pair := _compared(reader, leaf, rank, _AT_LEAST, _AT_MOST))]
    windows = [each for leaf in found.others if (each := _window(reader, leaf, rank))]
    mask = _four(reader.values[inside].shape, rank)
    visible = tuple(leaf for leaf in found.others if _side(_four(reader.values[leaf].shape, rank), mask) == "column")
    read = len(equal) + len(ordered) + len(windows) + len(visible)
    if len(equal) != 1 or len(ordered) > 1 or read != len(found.others):
        return None
    window, right = found.band
    causal = right == 0
    if not causal and found.band != WHOLE or causal and ordered or any(pair not in ordered for pair, _ in windows):
        return None
    window = min((size for _, size in windows), default=window)
    return DocumentMask(equal[0], ordered[0] if ordered else None, causal, rank, window, visible)


def _window(reader: MaskReader, name: str, rank: int) -> tuple[Pair, int] | None:
    """Return the positions that a condition ``position[column] > position[row] - size`` compares, and how many keys before its
    own position a query sees."""
    pair = _compared(reader, name, rank, _BELOW, _ABOVE)
    node = reader.producers.get(pair[0]) if pair is not None else None
    if pair is None or node is None or node.op not in ("aten.sub.Tensor", "aten.sub.Scalar") or len(node.args) != 2:
        return None
    row, size = node.args
    return ((row.name, pair[1]), size - 1) if isinstance(row, Ref) and isinstance(size, int) and size > 0 else None


def _without_heads(reader: MaskReader, name: str) -> str:
    """Return the mask ``[B or 1, S, T]`` that this one ``[B or 1, 1, S, T]`` is a view of; itself where it is none."""
    node = reader.producers.get(name)
    if node is None or node.op not in ("aten.unsqueeze", "aten.reshape"):
        return name
    (inner,), shape = node.operands(), node.outputs[0].shape
    inside = reader.values[inner].shape
    return inner if len(inside) == 3 and shape == (inside[0], 1, *inside[1:]) else name


def _compared(
    reader: MaskReader, name: str, rank: int, row_first: Sequence[str], column_first: Sequence[str]
) -> Pair | None:  # fmt: skip
    """Return what a condition compares by rows and by columns, in a mask of `rank` dimensions. `row_first`: operations of (rows,
    columns), or of both in any order where there are no `column_first`."""
    node = reader.producers.get(name)
    if node is None or node.op not in (*row_first, *column_first) or len(node.operands()) != 2:
        return None
    first, second = node.operands()
    if reader.values[first].dtype not in _INTEGERS or reader.values[second].dtype not in _INTEGERS:
        return None
    shape = _four(reader.values[name].shape, rank)
    sides = [_side(_four(reader.values[each].shape, rank), shape) for each in (first, second)]
    pair = (first, second) if sides == ["row", "column"] else (second, first) if sides == ["column", "row"] else None
    if pair is None or not column_first:
        return pair
    return pair if (node.op in row_first) == (pair == (first, second)) else None


def _four(shape: Shape, rank: int) -> Shape:
    """The shape with four dimensions, where a mask of `rank` dimensions has one for all heads."""
    wide = (*(1,) * (rank - len(shape)), *shape)
    return wide if rank == 4 else (*wide[:1], 1, *wide[1:])


def _side(shape: Shape, mask: Shape) -> str:
    """Return ``row`` or ``column`` for an operand of a mask ``[B or 1, 1, S, T]``."""
    if len(shape) != 4 or len(mask) != 4 or mask[1] != 1 or shape[1] != 1 or 1 in mask[2:]:
        return ""
    return "row" if shape[2:] == (mask[2], 1) else "column" if shape[2:] == (1, mask[3]) else ""


def document_operands(reader: MaskReader, mask: Node, form: DocumentMask) -> tuple[tuple[Node, ...], tuple[Arg, ...]]:
    """Return the nodes, in the place of a mask, that compute the operands of attention within documents, and these operands:
    documents and positions of queries and of keys."""
    nodes: list[Node] = []
    shapes: dict[str, Shape] = {}

    def node_of(op: str, args: tuple[Arg, ...], shape: Shape, dtype: str) -> Ref:
        name = f"{mask.name}_documents{len(nodes)}"
        nodes.append(node_like(mask, op, args, name, shape, dtype, False))
        shapes[name] = shape
        return Ref(name)

    def number(source: str, length_at: int) -> Ref:
        value = reader.values[source]
        shape = _four(value.shape, form.rank)
        flat = (shape[0], shape[length_at])
        return node_of("aten.reshape", (Ref(source), size_args(flat)), flat, value.dtype)

    def among_visible(documents: Ref, conditions: Sequence[str]) -> Ref:
        """Return twice the number of each document, and one more for keys that are not visible."""
        shape = shapes[documents.name]
        even = found = node_of("aten.mul.Tensor", (documents, 2), shape, "int64")
        odd = node_of("aten.add.Tensor", (even, 1), shape, "int64") if conditions else even
        for each in conditions:
            condition = number(each, 3)
            shape = shape if shapes[condition.name][0] == 1 else shapes[condition.name]
            found = node_of("aten.where.self", (condition, found, odd), shape, "int64")
        return found

    def positions(length_at: int) -> Ref:
        length = mask.outputs[0].shape[length_at - 4]
        steps = node_of(ARANGE, (0, *size_args((length,)), 1), (length,), "int64")
        return node_of("aten.reshape", (steps, size_args((1, length))), (1, length), "int64")

    queries, keys = number(form.documents[0], 2), number(form.documents[1], 3)
    if form.visible:
        queries, keys = among_visible(queries, ()), among_visible(keys, form.visible)
    operands: list[Arg] = [queries, keys]
    if form.positions is not None:
        operands += [number(form.positions[0], 2), number(form.positions[1], 3)]
    elif form.causal:
        operands += [positions(2), positions(3)]
    return tuple(nodes), tuple(operands)
