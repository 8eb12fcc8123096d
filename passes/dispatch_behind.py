"""Copies of tokens travel to their experts while what does not need the experts is computed: shared experts, say.

Before::

    %moe = ap.moe_experts_dispatched(%x, ..., axis='ep')
    %shared = aten.linear(%x, %w)
    %sum = aten.add.Tensor(%moe, %shared)

After (only where something lies between)::

    %moe_start = ap.moe_experts_start(%x, ..., axis='ep')
    %shared = aten.linear(%x, %w)
    %moe = ap.moe_experts_wait(%moe_start)
    %sum = aten.add.Tensor(%moe, %shared)

In the backward the wait sends gradients of the copies back and the start waits for them. What runs again stays in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Node, Ref
from autopar.passes.base import Context, Stage, first_uses, fresh
from autopar.passes.overlap import QUIET

DISPATCHED, EXPERTS_START, EXPERTS_WAIT = "ap.moe_experts_dispatched", "ap.moe_experts_start", "ap.moe_experts_wait"


@dataclass(frozen=True, slots=True)
class DispatchBehind:
    """Splits exchanges of tokens where work lies between them and the first use."""

    name: str = "dispatch_behind"

    def run(self, stage: Stage, context: Context) -> Stage:
        nodes, first = stage.block.nodes, first_uses(stage.block)
        taken, placements = set(stage.block.values()), dict(stage.placements)
        starts: dict[int, Node] = {}
        waits: dict[int, list[Node]] = {}
        for index, node in enumerate(nodes):
            if node.op != DISPATCHED or node.name in stage.again:
                continue
            use = first.get(node.name, len(nodes))
            if all(each.op in QUIET for each in nodes[index + 1 : use]):
                continue
            pending = replace(node.outputs[0], name=fresh(f"{node.name}_start", taken))
            placements[pending.name] = placements[node.name]
            starts[index] = replace(node, op=EXPERTS_START, outputs=(pending,))
            waits.setdefault(use, []).append(replace(node, op=EXPERTS_WAIT, args=(Ref(pending.name),), kwargs=()))
        if not starts:
            return stage
        changed: list[Node] = []
        for index, node in enumerate(nodes):
            changed += waits.get(index, [])
            changed.append(starts.get(index, node))
        return replace(stage.with_nodes([*changed, *waits.get(len(nodes), [])]), placements=placements)
