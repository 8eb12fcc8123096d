"""Extraction of some nodes of a block into a block of its own, with the matching part of the plan; and blocks that compute a few
values of earlier calls once more, in each model chunk that reads them, or before the micro-batches.

Used by `split_totals` and `split_stages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Block, Call, Graph, batch_input, lacks_batch
from autopar.ir.pipeline.stage_values import BlockSlice, joined_slices
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate
from autopar.passes.base import fresh_name


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
    """Return the block `name` of these `nodes` (by first output), which returns `outputs` in these `placements`. Where its sizes
    depend on the number of examples, and nothing that it reads tells that, it takes an input that does."""
    chosen = set(nodes)
    extracted = tuple(node for node in block.nodes if node.name in chosen)
    read = {operand for node in extracted for operand in node.operands()} | set(outputs)
    if lacks_batch(extracted, [value for value in block.inputs if value.name in read]):
        read |= {value.name for value in batch_input(block.inputs)}
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


@dataclass(slots=True)
class RepeatedBlocks:
    """The blocks of computations that are repeated, for several chunks or for totals; equal ones share a block."""

    graph: Graph
    candidate: Candidate
    blocks: list[Block] = field(default_factory=list)
    plans: list[BlockPlan] = field(default_factory=list)
    known: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = field(default_factory=dict)

    def repeat(self, names: Iterable[str], several: Sequence[Sequence[BlockSlice]]) -> list[Call]:
        """Calls that compute the `names` values."""
        slices = joined_slices(self.graph, several)
        needed, out = set(names), list[Call]()
        for block_slice in reversed(slices):
            call = self._call(block_slice, needed)
            needed |= set(call.inputs)
            out.append(call)
        return out[::-1]

    def _call(self, block_slice: BlockSlice, needed: set[str]) -> Call:
        call = self.graph.calls[block_slice.call]
        block, plan = self.graph.block(call.block), self.candidate.block(call.block)
        slots = [slot for slot, name in enumerate(call.outputs) if name in needed]
        results = tuple(block.outputs[slot] for slot in slots)
        key = call.block, block_slice.nodes, results
        names = {each.name for each in (*self.graph.blocks, *self.blocks)}
        name = self.known.get(key) or fresh_name(f"{call.block}Repeated", names)
        extracted = extract_block(name, block, plan, block_slice.nodes, results, [plan.outputs[slot] for slot in slots])
        if key not in self.known:
            self.known[key] = name
            self.blocks.append(extracted.block)
            self.plans.append(extracted.plan)
        return extracted.call(call, [call.outputs[slot] for slot in slots])
