"""Reads an attention mask: its conditions, which must all hold, and for each that depends on sizes only the band of positions
that it allows.

A condition that depends on ``column - row`` alone is evaluated once per distance (`diagonals`), not per pair, so the time is
linear in the sequence length. This is exact: each operation on the way is elementwise and reads rows and columns only as
``row + constant`` and ``column + constant``. Other conditions are evaluated in full if they are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.capture.constants import concrete, constant_nodes, evaluate_constant, kwargs_of, resolve
from autopar.capture.flat import FlatGraph
from autopar.ir.dims import has_batch
from autopar.ir.dims import shape_at as sizes
from autopar.ir.graph import Node, Value

Band = tuple[int | None, int | None]
WHOLE: Band = (None, None)
_BATCH = 2
_LONG = 1 << 12
_NO_END = 1 << 62
_LIMIT = 1 << 24
_FORBIDS = -1e4
_AND = ("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and")
_COMPARES = ("sub", "lt", "le", "gt", "ge", "eq", "ne")
_ELEMENTWISE = frozenset(
    ("__and__", "__or__", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "logical_not", "bitwise_not", "abs", "neg")
    + ("add", "mul", "where", "to", "masked_fill", "clone", "rsub", "logical_xor", *_COMPARES)
)
_FILLED = {"ones": 1, "new_ones": 1, "zeros": 0, "new_zeros": 0, "ones_like": 1, "zeros_like": 0}
_FULL = ("full", "full_like", "new_full")


@dataclass(frozen=True, slots=True)
class Conditions:
    """`band` is what the conditions that depend on sizes allow; `others` are the names of those that depend on data."""

    band: Band
    others: tuple[str, ...]


def conditions(reader: MaskReader, name: str) -> Conditions | None:
    """Return the conditions of a mask. None where a condition that sizes decide is no band. A mask of numbers is read as true
    where it is 0 and false where it is below -1e4; if data decides a part of it, it is left as it is."""
    found = reader.band(name)
    if found is not None:
        return Conditions(found, ())
    if reader.values[name].dtype != "bool":
        return None
    band, others = WHOLE, list[str]()
    for leaf in dict.fromkeys(reader.leaves(name)):
        found = reader.band(leaf)
        if found is not None:
            band = both(band, found)
        elif reader.is_constant(leaf):
            return None
        else:
            others.append(leaf)
    return Conditions(band, tuple(others))


def both(a: Band, b: Band) -> Band:
    """The intersection of two bands."""
    (left, right), (other_left, other_right) = a, b
    return _least(left, other_left), _least(right, other_right)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def of_distances(allowed: Tensor, rows: int) -> Band | None:
    """The band of a condition for every distance from ``1 - rows`` on."""
    where = allowed.nonzero().flatten()
    if not len(where) or int(where[-1] - where[0]) + 1 != len(where):
        return None
    first, last = int(where[0]) - rows + 1, int(where[-1]) - rows + 1
    if first > 0 or last < 0:
        return None
    return None if first == 1 - rows else -first, None if last == len(allowed) - rows else last


class MaskReader:
    """Reads the masks of one graph."""

    def __init__(self, flat: FlatGraph, batch: int = _BATCH) -> None:
        self.flat, self.batch = flat, batch
        self.values: Mapping[str, Value] = flat.values()
        self.producers = flat.producers()

    def leaves(self, name: str) -> list[str]:
        """The conditions whose conjunction a value is; broadcasting is left out."""
        node = self.producers.get(name)
        if node is not None and node.op in _AND:
            return [leaf for operand in node.operands() for leaf in self.leaves(operand)]
        if node is not None and node.op == "aten.expand" and len(node.outputs[0].shape) == len(self._shape(node.operands()[0])):
            return self.leaves(node.operands()[0])
        return [name]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(sizes(self.values[name].shape, self.batch))

    def is_constant(self, name: str) -> bool:
        """Return whether sizes decide the value."""
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            name = waiting.pop()
            node = self.producers.get(name)
            if node is None:
                return False
            if name not in seen:
                seen.add(name)
                waiting += node.operands()
        return True

    def band(self, name: str) -> Band | None:
        """The band that a value is; None where it is none, or data decides it."""
        if not self.is_constant(name):
            return None
        if self.batch == _BATCH and any(map(has_batch, self.values[name].shape[-2:])):
            return self._band_at_any_batch(name)
        shape = self._shape(name)
        rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, 1)
        if 1 in (rows, columns) or torch.Size(shape).numel() <= _LIMIT:
            found = self._dense(name)
            if found is not None or 1 in (rows, columns):
                return found
        along = self.diagonals(name, rows, columns)
        allowed = None if along is None else _allowed(along.expand(rows + columns - 1))
        return None if allowed is None else of_distances(allowed, rows)

    def _band_at_any_batch(self, name: str) -> Band | None:
        """The band of scores whose size is that of the batch (at two tokens every window sees them all): read at sizes beyond all
        numbers that are written in the condition, it is that of any size if it is the same at two of them."""
        nodes = constant_nodes(self.producers, name) or ()
        flat = [each for node in nodes for arg in node.args for each in (arg if isinstance(arg, tuple) else (arg,))]
        most = max((abs(each) for each in flat if isinstance(each, int) and abs(each) < _NO_END), default=0)
        batch = _LONG // max(sizes(self.values[name].shape[-2:], 1))
        if batch <= _BATCH or 4 * most >= _LONG:
            return None
        found = [MaskReader(self.flat, each).band(name) for each in (batch, batch // 2)]
        return found[0] if found[0] == found[1] else None

    def _dense(self, name: str) -> Band | None:
        mask = evaluate_constant(self.flat, name, self.batch, self.producers)
        allowed = None if mask is None else _allowed(mask)
        if allowed is None:
            return None
        if bool(allowed.all()):
            return WHOLE
        if allowed.dim() < 2 or 1 in allowed.shape[-2:]:
            return None
        rows, columns = allowed.shape[-2:]
        first = allowed.reshape(-1, rows, columns)[0]
        if not bool((allowed == first).all()):
            return None
        found = of_distances(torch.cat((first[:, 0].flip(0), first[0, 1:])), rows)
        distance = torch.arange(columns) - torch.arange(rows).unsqueeze(1)
        left, right = found or (0, 0)
        same = (distance >= -(rows if left is None else left)) & (distance <= (columns if right is None else right))
        return found if found is not None and torch.equal(same, first) else None

    def diagonals(self, name: str, rows: int, columns: int) -> Tensor | None:
        """The value for every distance from ``1 - rows`` to ``columns - 1``, or one for all of them; None where it depends on
        more than the distance."""
        node = self.producers[name]
        packet = node.op.split(".")[1]
        if packet in _FILLED or packet in _FULL:
            value = _FILLED.get(packet, node.args[-1])
            dtype = getattr(torch, node.outputs[0].dtype)
            return torch.tensor(value, dtype=dtype) if isinstance(value, (bool, int, float)) else None
        if packet in ("expand", "unsqueeze") and len(node.operands()) == 1:
            return self._operand(node.operands()[0], rows, columns)
        if packet in ("tril", "triu"):
            return self._triangle(node, packet, rows, columns)
        if packet not in _ELEMENTWISE:
            return None
        distance = torch.arange(1 - rows, columns)
        known: dict[str, Tensor] = {}
        vectors: dict[str, tuple[str, int]] = {}
        for operand in node.operands():
            line = self._line(operand, rows, columns)
            if line is not None:
                vectors[operand] = line
                continue
            found = self._operand(operand, rows, columns)
            if found is None:
                return None
            known[operand] = found
        if vectors:
            if packet not in _COMPARES or known or sorted(kind for kind, _ in vectors.values()) != ["column", "row"]:
                return None
            known = {each: distance + at if kind == "column" else torch.tensor(at) for each, (kind, at) in vectors.items()}
        try:
            args = (concrete(arg, known, self.batch) for arg in node.args)
            result = resolve(node.op)(*args, **kwargs_of(node, known, self.batch))
        except RuntimeError:
            return None
        return result if isinstance(result, Tensor) else None

    def _triangle(self, node: Node, packet: str, rows: int, columns: int) -> Tensor | None:
        inner = self._operand(node.operands()[0], rows, columns)
        at = node.args[1] if len(node.args) > 1 else 0
        if inner is None or not isinstance(at, int):
            return None
        distance = torch.arange(1 - rows, columns)
        return inner * (distance <= at if packet == "tril" else distance >= at)

    def _operand(self, name: str, rows: int, columns: int) -> Tensor | None:
        """Return an operand along distances: of the size of the scores, or the same everywhere."""
        if self._shape(name)[-2:] == (rows, columns):
            return self.diagonals(name, rows, columns)
        if torch.Size(self._shape(name)).numel() > _LIMIT:
            return None
        value = evaluate_constant(self.flat, name, self.batch, self.producers)
        if value is None or not value.numel() or not bool((value == value.flatten()[0]).all()):
            return None
        return value.flatten()[0]

    def _line(self, name: str, rows: int, columns: int) -> tuple[str, int] | None:
        """Return ``row`` or ``column``, and the constant, of an operand that is one of them plus a constant."""
        shape = self._shape(name)
        kinds = {(rows, 1): "row", (1, columns): "column", (columns,): "column"}
        kind = kinds.get(shape[-2:])
        if kind is None or self.values[name].dtype not in ("int64", "int32"):
            return None
        value = evaluate_constant(self.flat, name, self.batch, self.producers)
        if value is None:
            return None
        lines = value.reshape(-1, rows if kind == "row" else columns)
        start = int(lines[0, 0])
        line = torch.arange(start, start + lines.shape[1])
        return (kind, start) if bool((lines == line).all()) else None


def _allowed(mask: Tensor) -> Tensor | None:
    """Return a mask as true and false."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point() or not bool(((mask == 0) | (mask <= _FORBIDS)).all()):
        return None
    return mask == 0


__all__ = ["Band", "Conditions", "conditions"]
