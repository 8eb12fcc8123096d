"""Marks the values that the backward recomputes, that are offloaded to host memory until then, or saved in parts.

Before: the plan names them in terms of the captured block, here recompute_nodes ``(silu,)``, recompute_conversions
``(%x: S(1) -> R,)``, offload ``((q, S(1)),)`` and partition_saved ``((y, R, tp),)``; nothing is marked::

    %x_full = ap.convert(%x, axis='tp', conversion='S(1) -> R')
    %q = aten.linear(%x_full, %w)
    %silu = aten.silu(%q)
    %y = aten.layer_norm(%z)

After: the same nodes; `BlockState.recomputed` is ``{x_full, silu}``, `BlockState.offloaded` ``{q}``, and `BlockState.partitioned`
``{(y, tp)}``. Later passes keep the marks, and the generated program wraps what is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.graph import Node
from autopar.ir.partition_saved import chosen_tensors
from autopar.ir.placement import Placements
from autopar.operations.communication import CONVERT
from autopar.passes.base import BlockState, Context, only_gradient_changes

PlacedValue = tuple[str, Placements]
"""A value of the captured block in one placement."""


@dataclass(frozen=True, slots=True)
class MarkRecompute:
    """Finds nodes and conversions by the names that the plan gives them, so it runs directly after `InsertConversions`."""

    name: str = "mark_recompute"

    def run(self, state: BlockState, context: Context) -> BlockState:
        plan = context.plan
        if not chosen_tensors(plan):
            return state
        placed = dict(_placed_values(state))
        nodes = {node.name: node for node in state.block.nodes if node.op != CONVERT}
        converted = {placed[node.name]: node.name for node in state.block.nodes if node.op == CONVERT}
        targets = [(each.value, each.target) for each in plan.recompute_conversions]
        recomputed = {value.name for name in plan.recompute_nodes for value in _planned_node(nodes, name).outputs}
        recomputed |= {converted[target] for target in targets if target in converted}
        offloaded = {_name_of(wanted, placed, context) for wanted in plan.offload}
        partitioned = {(_name_of((value, at), placed, context), axis) for value, at, axis in plan.partition_saved}
        return replace(
            state,
            recomputed=frozenset(recomputed),
            offloaded=frozenset(offloaded - recomputed),
            partitioned=frozenset(each for each in partitioned if each[0] not in recomputed),
        )


def _planned_node(nodes: dict[str, Node], name: str) -> Node:
    if name not in nodes:
        raise PlanError(f"the plan recomputes {name}, which the graph does not have; plan the model again")
    return nodes[name]


def _placed_values(state: BlockState) -> Iterator[tuple[str, PlacedValue]]:
    """For each value of the rewritten block: the captured value and the placement that it stands for."""
    roots = {name: name for name in state.block.values()}
    for node in state.block.nodes:
        if node.op == CONVERT:
            roots[node.name] = roots[node.operands()[0]]
    return ((name, (root, state.placements[name])) for name, root in roots.items())


def _name_of(wanted: PlacedValue, placed: dict[str, PlacedValue], context: Context) -> str:
    """The name that a placed value has in the rewritten block. Axes of size 1, and conversions that change no value, have no
    node of their own."""

    def matches(found: PlacedValue, ignore_gradient: bool) -> bool:
        axes = zip(found[1], wanted[1], context.mesh.sizes, strict=True)
        return found[0] == wanted[0] and all(
            a == b or size == 1 or (ignore_gradient and only_gradient_changes(a, b)) for a, b, size in axes
        )

    exact = [name for name, found in placed.items() if matches(found, ignore_gradient=False)]
    found = exact or [name for name, found in placed.items() if matches(found, ignore_gradient=True)]
    if not found:
        raise PlanError(f"the plan offloads or partitions {wanted[0]} in a placement that it never has; plan the model again")
    return found[0]
