"""Unflattens tokens: row-wise operations, which treat each row of a tensor alike, on flattened tokens ``[B*S, H]`` become
operations on ``[B, S, H]``, whose dimensions ``B, S`` are the *lead*.

Before ``y = reshape(x [B, S, H], [B*S, H]); z = topk(linear(y, w), 2); reshape(z, [B, S, 2])``, after ``topk(linear(x, w), 2)``.
A sharded sequence has no placement in ``B*S``, since only the major one of merged dimensions can be sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar.capture.constants import resolve
from autopar.capture.flat import FlatGraph, rename_operands, size_args
from autopar.ir.dims import Dim, Shape, as_dim, as_sympy
from autopar.ir.graph import Arg, Node, Ref, Value
from autopar.operations.pointwise import ROTARY_EMBEDDING


def unflatten(flat: FlatGraph) -> FlatGraph:
    """The graph with row-wise operations on unflattened tensors; all other operations get flattened ones, as before."""
    return _Rows(flat).run()


def _product(sizes: Shape) -> Dim:
    total = as_sympy(1)
    for size in sizes:
        total = total * as_sympy(size)
    return as_dim(total)


class _Rows:
    def __init__(self, flat: FlatGraph) -> None:
        self.flat, self.values = flat, flat.values()
        self.nodes: list[Node] = []
        self.lead: dict[str, Shape] = {}
        self.apart: dict[str, str] = {}
        self.written = {value.name for value in flat.inputs} | {source.value.name for source in flat.state_tensors}

    def run(self) -> FlatGraph:
        for node in self.flat.nodes:
            if not (self.starts(node) or self.reshapes(node) or self.keeps(node)):
                self.merge(node, node.operands())
                self.emit(node)
        if self.nodes:
            self.merge(self.nodes[-1], self.flat.results)
        return replace(self.flat, nodes=tuple(self.nodes))

    def emit(self, node: Node) -> None:
        self.nodes.append(node)
        self.written.update(value.name for value in node.outputs)

    def know(self, name: str, apart: str, lead: Shape) -> None:
        self.apart[name], self.lead[name] = apart, lead

    def view(self, at: Node, source: str, value: Value) -> None:
        """``value = reshape(source)`` at the place of a node."""
        self.emit(replace(at, op="aten.reshape", args=(Ref(source), size_args(value.shape)), kwargs=(), outputs=(value,)))

    def merge(self, at: Node, names: tuple[str, ...]) -> None:
        """Writes values as they were, where they are only known apart."""
        for name in names:
            if name not in self.written and name in self.apart:
                self.view(at, self.apart[name], self.values[name])

    def separate(self, at: Node, name: str, lead: Shape) -> str:
        """The name of a value with its rows apart."""
        if name not in self.apart:
            self.know(name, self.added(name, lead), lead)
            self.view(at, name, self.values[self.apart[name]])
        return self.apart[name]

    def added(self, name: str, lead: Shape) -> str:
        """A value like `name` with its rows apart."""
        value = self.values[name]
        new = replace(value, name=f"{name}_rows", shape=(*lead, *value.shape[1:]))
        self.values[new.name] = new
        return new.name

    def starts(self, node: Node) -> bool:
        """A reshape that merges leading dimensions into rows."""
        if node.op != "aten.reshape" or node.operands()[0] in self.apart:
            return False
        source, result = node.operands()[0], node.outputs[0]
        shape, count = self.values[source].shape, len(self.values[source].shape) - len(result.shape) + 1
        if not 1 <= len(result.shape) <= 2 or count < 2 or sum(size != 1 for size in shape[:count]) < 2:
            return False
        if shape[count:] != result.shape[1:] or _product(shape[:count]) != result.shape[0]:
            return False
        self.know(result.name, source, shape[:count])
        return True

    def reshapes(self, node: Node) -> bool:
        """A reshape of rows: of each row, of rows and more into one dimension, or back to where they came from."""
        if node.op != "aten.reshape" or node.operands()[0] not in self.apart:
            return False
        before = node.operands()[0]
        lead, source, result = self.lead[before], self.apart[before], node.outputs[0]
        shape = self.values[before].shape
        if result.shape and result.shape[0] == shape[0]:
            self.know(result.name, self.added(result.name, lead), lead)
            self.view(node, source, self.values[self.apart[result.name]])
            return True
        for count in range(2, len(shape) + 1):
            if result.shape == (_product(shape[:count]), *shape[count:]):
                self.know(result.name, source, (*lead, *shape[1:count]))
                return True
        self.view(node, source, result)
        return True

    def keeps(self, node: Node) -> bool:
        """An operation that takes each row for itself."""
        operands = [name for name in node.operands() if name in self.apart]
        rowwise = rowwise_node(node, self.values, self.lead) if operands else None
        if rowwise is None:
            return False
        lead = self.lead[operands[0]]
        names: Mapping[str, str] = {name: self.separate(node, name, lead) for name in sorted(rowwise.rows)}
        others = tuple(name for name in node.operands() if name not in rowwise.rows)
        self.merge(node, others)
        new = rename_operands(rowwise.node, names)
        if rowwise.lead is not None:
            for value in node.outputs:
                self.know(value.name, self.added(value.name, rowwise.lead), rowwise.lead)
            new = replace(new, outputs=tuple(self.values[self.apart[value.name]] for value in node.outputs))
        self.emit(new)
        return True


WHOLE = ("aten.sum", "aten.mean", "aten.max", "aten.min", "aten.histc", "ap.count_valid", "ap.cross_entropy_sum")
"""Reductions over all elements, whatever their dimensions."""
OVER = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax", "aten.amin", "aten.logsumexp", "aten.any.dims", "aten.all.dims")
"""Reductions over some dimensions."""
LIKE = (
    "aten.to", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.clone", "aten.detach", "aten.expand", ROTARY_EMBEDDING
)  # fmt: skip
"""One result for each element."""
ROWS_AT: Mapping[str, tuple[int, ...]] = {
    "aten.linear": (0,),
    "ap.linear_kn": (0,),
    "aten.one_hot": (0,),
    "aten.embedding": (1,),
    "ap.moe_experts": (0, 1, 2),
    "ap.token_log_probs": (0, 1),
}
"""The operands that hold the rows, of operations for which all other dimensions belong to a row."""
ALONG: Mapping[str, tuple[int, Arg]] = {
    **dict.fromkeys(("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.cumsum"), (1, None)),
    **dict.fromkeys(("aten.gather", "aten.scatter", "aten.scatter_add", "aten.unsqueeze", "aten.select"), (1, None)),
    **dict.fromkeys(("aten.argmax", "aten.argmin", "aten.max", "aten.min"), (1, None)),
    **dict.fromkeys(("aten.sort", "aten.argsort"), (1, -1)),
    **dict.fromkeys(("aten.slice", "aten.cat"), (1, 0)),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), (2, 0)),
    "aten.topk": (2, -1),
}
"""Operations along one dimension: the position of that argument, and its default."""


@dataclass(frozen=True, slots=True)
class RowwiseNode:
    """The form of a node whose operands `rows` are unflattened; they still have their old names. `lead` is that of its results,
    None where these do not change."""

    node: Node
    rows: frozenset[str]
    lead: Shape | None = None


def rowwise_node(node: Node, values: Mapping[str, Value], apart: Mapping[str, Shape]) -> RowwiseNode | None:
    """The form of a row-wise node; None where it is not row-wise. `apart` has the lead of the values that are unflattened."""
    packet = ".".join(node.op.split(".")[:2])
    given = [name for name in node.operands() if name in apart]
    lead, number = apart[given[0]], values[given[0]].shape[0]
    if any(apart[name] != lead or values[name].shape[0] != number for name in given):
        return None
    if node.op in WHOLE:
        same = all(values[name].shape[:1] == (number,) for name in node.operands())
        return RowwiseNode(node, frozenset(node.operands())) if same else None
    rank = max(len(values[name].shape) for name in node.operands())
    if packet in ROWS_AT:
        rows = frozenset(arg.name for index in ROWS_AT[packet] if isinstance(arg := node.args[index], Ref))
        if set(given) - rows or any(values[name].shape[:1] != (number,) for name in rows):
            return None
        return _of_rows(node, rows, number, lead)
    rows = frozenset(name for name in node.operands() if len(values[name].shape) == rank and values[name].shape[0] == number)
    if set(given) - rows:
        return None
    if node.op in OVER:
        return _over(node, rows, number, lead, rank)
    if packet in ALONG:
        return _along(node, packet, rows, number, lead, rank)
    if packet == "aten.expand":
        if len(node.outputs[0].shape) != rank:
            return None
        return _of_rows(_with(node, 1, size_args((*lead, *node.outputs[0].shape[1:]))), rows, number, lead)
    if packet in LIKE or _is_pointwise(node):
        return _of_rows(node, rows, number, lead) if all(len(value.shape) == rank for value in node.outputs) else None
    return None


def _is_pointwise(node: Node) -> bool:
    return node.op.startswith("aten.") and torch.Tag.pointwise in resolve(node.op).tags


def _of_rows(node: Node, rows: frozenset[str], number: Dim, lead: Shape) -> RowwiseNode | None:
    same = all(value.shape[:1] == (number,) for value in node.outputs)
    return RowwiseNode(node, rows, lead) if same else None


def _with(node: Node, index: int, arg: Arg) -> Node:
    return replace(node, args=(*node.args[:index], arg, *node.args[index + 1 :]))


def _over(node: Node, rows: frozenset[str], number: Dim, lead: Shape, rank: int) -> RowwiseNode | None:
    """A reduction over some dimensions: over the rows, it is over all dimensions of the lead."""
    given = node.args[1] if len(node.args) > 1 else None
    if node.kwargs or given is None or given == ():
        return None
    dims = [int(dim) % rank for dim in (given if isinstance(given, tuple) else (given,))]  # type: ignore[arg-type]
    more = len(lead) - 1
    if 0 not in dims:
        return _of_rows(_with(node, 1, tuple(dim + more for dim in dims)), rows, number, lead)
    if len(node.args) > 2 and node.args[2]:
        return None
    return RowwiseNode(_with(node, 1, (*range(len(lead)), *(dim + more for dim in dims if dim))), rows)


def _along(node: Node, packet: str, rows: frozenset[str], number: Dim, lead: Shape, rank: int) -> RowwiseNode | None:
    at, default = ALONG[packet]
    named = dict(node.kwargs).get("dim")
    dim = node.args[at] if len(node.args) > at else named if named is not None else default
    if not isinstance(dim, int):
        return None
    dim %= rank + (packet == "aten.unsqueeze")
    if dim == 0 and packet == "aten.cat" and len(rows) == len(node.args[0]):  # type: ignore[arg-type]
        return RowwiseNode(replace(node, op="aten.stack", args=(node.args[0], 0), kwargs=()), rows, (len(rows), *lead))
    if dim == 0:
        return None
    moved = dim + len(lead) - 1
    if named is not None:
        kwargs = tuple((key, moved if key == "dim" else arg) for key, arg in node.kwargs)
        return _of_rows(replace(node, kwargs=kwargs), rows, number, lead)
    if len(node.args) > at:
        return _of_rows(_with(node, at, moved), rows, number, lead)
    return _of_rows(node if default == -1 else replace(node, kwargs=(*node.kwargs, ("dim", moved))), rows, number, lead)
