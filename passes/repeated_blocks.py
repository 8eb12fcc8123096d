"""Computations of a few values of earlier calls once more: by each model chunk that reads them, or before the micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Block, Call, Graph
from autopar.ir.pipeline.stage_values import BlockSlice, joined_slices
from autopar.ir.plan import BlockPlan, Candidate
from autopar.passes.base import fresh_name
from autopar.passes.extract_block import extract_block


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
