"""Aliasing: which placed values share storage."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.ir.graph import Block
from autopar.ir.placement import Placements
from autopar.ir.plan import Conversion, NodePlan
from autopar.operations.table import operation
from autopar.rules.conversions import axis_conversion, changed_axis

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
