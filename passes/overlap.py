"""Collectives start as soon as their operand exists and are waited for at the first use.

Before::

    %x = aten.add.Tensor(%a, %b)
    %g = aten.silu(%c)
    %x_full = ap.convert(%x, axis='tp', move='S(1) -> R')

After (only where something lies between)::

    %x = aten.add.Tensor(%a, %b)
    %x_full_start = ap.start(%x, axis='tp', move='S(1) -> R')
    %g = aten.silu(%c)
    %x_full = ap.wait(%x_full_start)

In the backward the wait starts the dual collective and the start waits for it. What runs again stays in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Node, Ref
from autopar.passes.base import CONVERT, CONVERT_MANY, START, WAIT, Context, Stage, fresh, move_of, producers

QUIET = frozenset({CONVERT, CONVERT_MANY, START, WAIT, "aten.reshape", "aten.transpose.int", "aten.unsqueeze", "aten.to.dtype"})
"""Operations that take no time behind which to hide a collective."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Splits conversions that communicate where work lies between producer and first use."""

    name: str = "overlap"

    def run(self, stage: Stage, context: Context) -> Stage:
        nodes, made = stage.block.nodes, producers(stage.block)
        taken, placements = set(stage.block.values()), dict(stage.placements)
        starts: dict[int, list[Node]] = {}
        waits: dict[int, Node] = {}
        for index, node in enumerate(nodes):
            if node.op != CONVERT or node.name in stage.again or not move_of(node, stage, context).communicates:
                continue
            source = made[node.operands()[0]]
            if all(each.op in QUIET for each in nodes[source + 1 : index]):
                continue
            pending = replace(node.outputs[0], name=fresh(f"{node.name}_start", taken))
            placements[pending.name] = placements[node.name]
            starts.setdefault(source, []).append(replace(node, op=START, outputs=(pending,)))
            waits[index] = replace(node, op=WAIT, args=(Ref(pending.name),), kwargs=())
        if not waits:
            return stage
        changed = list(starts.get(-1, []))
        for index, node in enumerate(nodes):
            changed.append(waits.get(index, node))
            changed += starts.get(index, [])
        return replace(stage.with_nodes(changed), placements=placements)
