"""Splits communication in a start and a wait, so that independent work between the two overlaps with it.

`OverlapCollectives`, before::

    %x = aten.add.Tensor(%a, %b)
    %g = aten.silu(%c)
    %x_full = ap.convert(%x, axis='tp', conversion='S(1) -> R')

After: the collective starts as soon as its operand exists, and the wait stands before the first use (only where work lies
between)::

    %x = aten.add.Tensor(%a, %b)
    %x_full_start = ap.start(%x, axis='tp', conversion='S(1) -> R')
    %g = aten.silu(%c)
    %x_full = ap.wait(%x_full_start)

`OverlapExpertDispatch`, before::

    %moe = ap.moe_experts_dispatched(%x, ..., axis='ep')
    %shared = aten.linear(%x, %w)
    %sum = aten.add.Tensor(%moe, %shared)

After: tokens are exchanged while shared experts, and whatever else does not read the result, are computed::

    %moe_start = ap.moe_experts_start(%x, ..., axis='ep')
    %shared = aten.linear(%x, %w)
    %moe = ap.moe_experts_wait(%moe_start)
    %sum = aten.add.Tensor(%moe, %shared)

In the backward the wait starts the dual collective (of experts: the exchange of the gradients) and the start waits for it.
What is recomputed is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Node, Ref
from autopar.ir.placement import Placements
from autopar.operations.communication import CONVERT, CONVERT_MANY, START, WAIT
from autopar.operations.experts import DISPATCHED, EXPERTS_START, EXPERTS_WAIT
from autopar.operations.table import operation
from autopar.passes.base import BlockState, Context, conversion_of, first_use_indices, fresh_name, producer_indices


@dataclass(frozen=True, slots=True)
class OverlapCollectives:
    """Splits conversions that communicate where work lies between their operand and their first use."""

    name: str = "overlap"

    def run(self, state: BlockState, context: Context) -> BlockState:
        nodes, producers = state.block.nodes, producer_indices(state.block)
        rewrite = _StartsAndWaits(state)
        for index, node in enumerate(nodes):
            if node.op != CONVERT or node.name in state.recomputed or not conversion_of(node, state, context).communicates:
                continue
            after_operand = producers[node.operands()[0]] + 1
            if _has_work(nodes[after_operand:index]):
                start, wait = rewrite.split(node, START, WAIT)
                rewrite.before.setdefault(after_operand, []).append(start)
                rewrite.replaced[index] = wait
        return rewrite.result()


@dataclass(frozen=True, slots=True)
class OverlapExpertDispatch:
    """Splits expert dispatch where work lies between it and the first use of its result."""

    name: str = "overlap_expert_dispatch"

    def run(self, state: BlockState, context: Context) -> BlockState:
        nodes, first_use = state.block.nodes, first_use_indices(state.block)
        rewrite = _StartsAndWaits(state)
        for index, node in enumerate(nodes):
            if node.op != DISPATCHED or node.name in state.recomputed:
                continue
            use = first_use.get(node.name, len(nodes))
            if _has_work(nodes[index + 1 : use]):
                start, wait = rewrite.split(node, EXPERTS_START, EXPERTS_WAIT)
                rewrite.replaced[index] = start
                rewrite.before.setdefault(use, []).append(wait)
        return rewrite.result()


def _has_work(nodes: Sequence[Node]) -> bool:
    """Return whether a collective could overlap with something; views, conversions and casts take no computing time."""
    return not all(operation(node.op).shares_storage or node.op in (CONVERT_MANY, START, WAIT) for node in nodes)


@dataclass(slots=True)
class _StartsAndWaits:
    """The nodes that `state` gets: `replaced` by the index of the node whose place they take, `before` by the index before which
    they are inserted."""

    state: BlockState
    before: dict[int, list[Node]] = field(default_factory=dict)
    replaced: dict[int, Node] = field(default_factory=dict)
    taken: set[str] = field(init=False)
    placements: dict[str, Placements] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = set(self.state.block.values())
        self.placements = dict(self.state.placements)

    def split(self, node: Node, start_op: str, wait_op: str) -> tuple[Node, Node]:
        """Return `node` as a start, whose result is pending, and the wait for it."""
        pending = replace(node.outputs[0], name=fresh_name(f"{node.name}_start", self.taken))
        self.placements[pending.name] = self.placements[node.name]
        start = replace(node, op=start_op, outputs=(pending,))
        return start, replace(node, op=wait_op, args=(Ref(pending.name),), kwargs=())

    def result(self) -> BlockState:
        if not self.replaced:
            return self.state
        nodes = self.state.block.nodes
        changed: list[Node] = []
        for index, node in enumerate(nodes):
            changed += self.before.get(index, [])
            changed.append(self.replaced.get(index, node))
        changed += self.before.get(len(nodes), [])
        return replace(self.state.with_nodes(changed), placements=self.placements)
