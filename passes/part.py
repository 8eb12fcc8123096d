"""Some nodes of a block as a block of its own, with their part of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Block, Call
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan


@dataclass(frozen=True, slots=True)
class Part:
    """The new block, its plan, and which inputs and parameters of the old one it has."""

    block: Block
    plan: BlockPlan
    inputs: tuple[int, ...]
    parameters: tuple[int, ...]

    def call(self, like: Call, outputs: Sequence[str]) -> Call:
        """The call that takes what `like`, a call of the old block, takes. `outputs` are the names of its results."""
        inputs = tuple(like.inputs[index] for index in self.inputs)
        parameters = tuple(like.parameters[index] for index in self.parameters)
        return Call(self.block.name, like.prefix, inputs, tuple(outputs), parameters)


def produced(block: Block, plan: BlockPlan) -> dict[str, Placements]:
    """Where the nodes of a block leave their results."""
    outputs = {node.name: node.outputs for node in block.nodes}
    return {value.name: at for node in plan.nodes for value, at in zip(outputs[node.node], node.results, strict=True)}


def part(
    name: str, block: Block, plan: BlockPlan, nodes: Sequence[str], outputs: Sequence[str], ends: Sequence[Placements]
) -> Part:
    """`nodes` by the names of their first outputs; `ends` is where the results, `outputs`, leave the part."""
    chosen = set(nodes)
    kept = tuple(node for node in block.nodes if node.name in chosen)
    read = {operand for node in kept for operand in node.operands()} | set(outputs)
    inputs = tuple(index for index, value in enumerate(block.inputs) if value.name in read)
    parameters = tuple(index for index, parameter in enumerate(block.parameters) if parameter.value.name in read)
    made = {value.name for node in kept for value in node.outputs}
    known = made | {block.inputs[index].name for index in inputs} | {block.parameters[index].value.name for index in parameters}
    return Part(
        Block(
            name,
            tuple(block.inputs[index] for index in inputs),
            tuple(block.parameters[index] for index in parameters),
            kept,
            tuple(outputs),
        ),
        BlockPlan(
            name,
            tuple(plan.inputs[index] for index in inputs),
            tuple(plan.parameters[index] for index in parameters),
            tuple(ends),
            tuple(node for node in plan.nodes if node.node in chosen),
            tuple(arc for arc in plan.arcs if arc.value in known),
            plan.zero,
        ),
        inputs,
        parameters,
    )
