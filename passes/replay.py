"""Marks what the backward runs once more, and what waits for it on the host.

Before (the plan has ``again=('silu',)``, ``again_arcs=(%x: S(1) -> R,)`` and ``offload=(('q', S(1)),)``)::

    %x_full = ap.convert(%x, axis='tp', move='S(1) -> R')
    %q = aten.linear(%x_full, %w)
    %silu = aten.silu(%q)

After, the same with marks (of the stage, not of the nodes), which the passes behind keep and the text shows::

    %x_full = again(C.convert, %x, tp, "S(1) -> R")
    %q = F.linear(%x_full, %w)
    again.offload(%q)
    %silu = again(F.silu, %q)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.graph import Node
from autopar.ir.placement import Placements
from autopar.passes.base import CONVERT, Context, Stage, equal_copies

State = tuple[str, Placements]
"""A value of the captured block in one placement."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Finds the nodes and conversions by the names that the plan gives them. Stands right behind those that insert them."""

    name: str = "replay"

    def run(self, stage: Stage, context: Context) -> Stage:
        plan = context.plan
        if not (plan.again or plan.again_arcs or plan.offload):
            return stage
        states = dict(_states(stage))
        nodes = {node.name: node for node in stage.block.nodes if node.op != CONVERT}
        converted = {states[node.name]: node.name for node in stage.block.nodes if node.op == CONVERT}
        arcs = [(arc.value, arc.target) for arc in plan.again_arcs]
        again = {value.name for name in plan.again for value in _again(nodes.get(name), name).outputs}
        again |= {converted[state] for state in arcs if state in converted}
        offload: set[str] = set()
        for state in plan.offload:
            found = _at(state, states, context)
            if not found:
                raise PlanError(f"the plan keeps {state[0]} on the host in a placement that it never has; plan the model again")
            offload.add(found[0])
        return replace(stage, again=frozenset(again), offload=frozenset(offload - again))


def _again(node: Node | None, name: str) -> Node:
    if node is None:
        raise PlanError(f"the plan runs {name} again, which the graph has not; plan the model again")
    return node


def _states(stage: Stage) -> Iterator[tuple[str, State]]:
    """Every value by its name now, and the state that it is."""
    roots: dict[str, str] = {}
    for name in stage.block.values():
        roots[name] = name
    for node in stage.block.nodes:
        if node.op == CONVERT:
            roots[node.name] = roots[node.operands()[0]]
    return ((name, (root, stage.placements[name])) for name, root in roots.items())


def _at(wanted: State, states: dict[str, State], context: Context) -> list[str]:
    """The names of a state. Axes of one rank, and conversions that change nothing, have no node of their own."""

    def same(found: State) -> bool:
        pairs = zip(found[1], wanted[1], context.mesh.sizes, strict=True)
        return found[0] == wanted[0] and all(a == b or size == 1 for a, b, size in pairs)

    def equal(found: State) -> bool:
        pairs = zip(found[1], wanted[1], context.mesh.sizes, strict=True)
        return found[0] == wanted[0] and all(a == b or size == 1 or equal_copies(a, b) for a, b, size in pairs)

    exact = [name for name, state in states.items() if same(state)]
    return exact or [name for name, state in states.items() if equal(state)]
