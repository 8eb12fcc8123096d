"""Unflattens tokens: row-wise operations on flattened tokens ``[B*S, H]`` become operations on ``[B, S, H]``.

Before ``y = reshape(x [B, S, H], [B*S, H]); z = topk(linear(y, w), 2); reshape(z, [B, S, 2])``, after ``topk(linear(x, w), 2)``.
A sharded sequence has no placement in ``B*S``, since only the major one of merged dimensions can be sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.capture.flat import FlatGraph, rename_operands, size_args
from autopar.capture.normalize.rows import rowwise_node
from autopar.ir.dims import Dim, Shape, as_dim, as_sympy
from autopar.ir.graph import Node, Ref, Value


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
