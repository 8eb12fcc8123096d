"""Which values in which placements are one tensor in memory."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cost_models.flops import VIEWS, packet
from autopar.ir.graph import Block
from autopar.ir.placement import Placements
from autopar.ir.plan import Arc, NodePlan
from autopar.rules.conversions import changed_axis, conversion

State = tuple[str, Placements]
"""A value in one placement."""


class Aliases:
    """Which states are one tensor: union-find over (value, placements)."""

    def __init__(self) -> None:
        self._parent: dict[State, State] = {}

    def find(self, state: State) -> State:
        parent = self._parent
        while (above := parent.get(state, state)) != state:
            parent[state] = parent.get(above, above)
            state = parent[state]
        return state

    def union(self, first: State, second: State) -> None:
        """The first stays the name of both."""
        first, second = self.find(first), self.find(second)
        if first != second:
            self._parent[second] = first


def aliases(block: Block, plans: Iterable[NodePlan], arcs: Iterable[Arc]) -> Aliases:
    """States that share storage: a view and what it views, and a conversion that does nothing forward (Invariant to Replicate and
    back). `plans` may be all strategies of all nodes, `arcs` all legal arcs: a union holds whenever its strategy is chosen."""
    found = Aliases()
    nodes = {node.name: node for node in block.nodes}
    values = block.values()
    for plan in plans:
        node = nodes[plan.node]
        if packet(node.op) in VIEWS and plan.operands:
            for output, placements in zip(node.outputs, plan.results, strict=True):
                found.union((node.operands()[0], plan.operands[0]), (output.name, placements))
    for arc in arcs:
        axis = changed_axis(arc.source, arc.target)
        how = conversion(arc.source[axis], arc.target[axis], values[arc.value].differentiable)
        if how is not None and how.forward is None:
            found.union((arc.value, arc.source), (arc.value, arc.target))
    return found
