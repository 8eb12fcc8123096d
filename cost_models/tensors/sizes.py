"""Bytes of tensors, how many ways placements shard them, and aliasing: which placed values share storage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir import dims
from autopar.ir.graph import Block, Graph, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import Conversion, NodePlan
from autopar.operations.table import operation
from autopar.rules.conversions import axis_conversion, changed_axis

_ITEMSIZE = {
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element; what is not listed (bool, int8, uint8, float8) takes one."""
    return _ITEMSIZE.get(dtype, 1)


def value_bytes(value: Value, batch: int) -> int:
    """Bytes of the global tensor at global batch `batch`."""
    return dims.numel(value.shape, batch) * itemsize(value.dtype)


def user_held_bytes(graph: Graph, batch: int, mesh: Mesh) -> float:
    """Bytes on one device of tensors that the user's loop holds during a step: the global batch, which every rank has, and the
    outputs beside the loss, of which a data rank has its shard (model axes are taken to shard nothing of it)."""
    given = sum(value_bytes(value, batch) for value in graph.inputs)
    asked, returned = {output.value for output in graph.outputs}, 0
    for call in graph.calls if asked else ():
        block = graph.block(call.block)
        made = {name: inner for name, inner in zip(call.outputs, block.outputs, strict=True) if name in asked}
        if made:
            values = block.values()
            returned += sum(value_bytes(values[inner], batch) for inner in made.values())
    return given + returned / mesh.size_of(DATA_AXIS)


def shard_count(placements: Placements, axis_sizes: Sequence[int]) -> int:
    """Return how many ways the placements shard a tensor."""
    count = 1
    for placement, size in zip(placements, axis_sizes, strict=True):
        if type(placement) is Shard:
            count *= size
    return count


PlacedValue = tuple[str, Placements]
"""A value and its placements."""


class Aliases:
    """Union-find over placed values that share storage."""

    def __init__(self) -> None:
        self._parent: dict[PlacedValue, PlacedValue] = {}

    def find(self, placed: PlacedValue) -> PlacedValue:
        parent = self._parent
        while (above := parent.get(placed, placed)) != placed:
            parent[placed] = parent.get(above, above)
            placed = parent[placed]
        return placed

    def union(self, first: PlacedValue, second: PlacedValue) -> None:
        """`first` becomes the representative of both."""
        first, second = self.find(first), self.find(second)
        if first != second:
            self._parent[second] = first


def aliases(block: Block, plans: Iterable[NodePlan], conversions: Iterable[Conversion]) -> Aliases:
    """Placed values that share storage: a view and its base, and both ends of a conversion without a forward (Invariant to
    Replicate and back). `plans` may be all strategies of all nodes, `conversions` all legal ones: a union holds whenever its
    strategy is chosen."""
    found = Aliases()
    nodes = {node.name: node for node in block.nodes}
    values = block.values()
    for plan in plans:
        node = nodes[plan.node]
        if operation(node.op).view and plan.operands:
            for output, placements in zip(node.outputs, plan.results, strict=True):
                found.union((node.operands()[0], plan.operands[0]), (output.name, placements))
    for each in conversions:
        axis = changed_axis(each.source, each.target)
        how = axis_conversion(each.source[axis], each.target[axis], values[each.value].differentiable)
        if how is not None and how.forward is None:
            found.union((each.value, each.source), (each.value, each.target))
    return found
