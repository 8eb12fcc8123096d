"""Extraction of some nodes of a block into a block of its own, with the matching part of the plan.

Used by `split_totals` and `repeated_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Block, Call
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan


@dataclass(frozen=True, slots=True)
class SubBlock:
    """An extracted block and its plan. `inputs` and `parameters` are positions among those of the original block."""

    block: Block
    plan: BlockPlan
    inputs: tuple[int, ...]
    parameters: tuple[int, ...]

    def call(self, like: Call, outputs: Sequence[str]) -> Call:
        """The call of this block with the operands of `like`, a call of the original block. `outputs` names its results."""
        inputs = tuple(like.inputs[index] for index in self.inputs)
        parameters = tuple(like.parameters[index] for index in self.parameters)
        return Call(self.block.name, like.prefix, inputs, tuple(outputs), parameters)


def produced_placements(block: Block, plan: BlockPlan) -> dict[str, Placements]:
    """Return the placement in which each result of a node is produced."""
    outputs = {node.name: node.outputs for node in block.nodes}
    return {value.name: at for node in plan.nodes for value, at in zip(outputs[node.node], node.results, strict=True)}


def extract_block(
    name: str, block: Block, plan: BlockPlan, nodes: Sequence[str], outputs: Sequence[str], placements: Sequence[Placements]
) -> SubBlock:
    """Return the block `name` of these `nodes` (by first output), which returns `outputs` in these `placements`."""
    chosen = set(nodes)
    extracted = tuple(node for node in block.nodes if node.name in chosen)
    read = {operand for node in extracted for operand in node.operands()} | set(outputs)
    inputs = tuple(index for index, value in enumerate(block.inputs) if value.name in read)
    parameters = tuple(index for index, parameter in enumerate(block.parameters) if parameter.value.name in read)
    produced = {value.name for node in extracted for value in node.outputs}
    values = (
        produced | {block.inputs[index].name for index in inputs} | {block.parameters[index].value.name for index in parameters}
    )
    return SubBlock(
        Block(
            name,
            tuple(block.inputs[index] for index in inputs),
            tuple(block.parameters[index] for index in parameters),
            extracted,
            tuple(outputs),
        ),
        BlockPlan(
            block=name,
            inputs=tuple(plan.inputs[index] for index in inputs),
            parameters=tuple(plan.parameters[index] for index in parameters),
            outputs=tuple(placements),
            nodes=tuple(node for node in plan.nodes if node.node in chosen),
            conversions=tuple(each for each in plan.conversions if each.value in values),
            zero=plan.zero,
        ),
        inputs,
        parameters,
    )
