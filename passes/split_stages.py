"""The calls of a pipeline's chunks, what goes from one chunk to the next, and what each makes for itself.

Before (cut behind layer 0; `cos` has no gradient, the inputs of the batch determine it, and the plan repeats it)::

    hidden, cos = Prologue(ids); h0 = Layer[0](hidden, cos); h1 = Layer[1](h0, cos); loss = Epilogue(h1, labels)

After::

    chunk 0: hidden, cos = Prologue(ids); h0 = Layer[0](hidden, cos)          sends h0
    chunk 1: cos = PrologueTables(ids); h1 = Layer[1](h0, cos); ...           receives h0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.ir.chunks import chunk_calls
from autopar.ir.graph import Block, Call, Graph
from autopar.ir.plan import BlockPlan, Candidate
from autopar.ir.stages import Piece, check_cuts, crossing, joined, repeatable
from autopar.passes.base import fresh
from autopar.passes.part import part


@dataclass(frozen=True, slots=True)
class ChunkCalls:
    """One chunk: its calls in order, and the values that it receives from the one before and sends to the one behind."""

    calls: tuple[Call, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """A graph and its plan with the blocks of what is repeated, and the chunks."""

    graph: Graph
    candidate: Candidate
    chunks: tuple[ChunkCalls, ...]


def split_stages(graph: Graph, candidate: Candidate) -> Staged:
    """The chunks in the model's order; for one stage, all calls. PlanError where the graph cannot be cut so."""
    pipeline = candidate.pipeline
    if pipeline.stages == 1:
        return Staged(graph, candidate, (ChunkCalls(graph.calls, (), graph.results),))
    chunks = chunk_calls(graph, pipeline)
    check_cuts(graph, chunks)
    known = repeatable(graph)
    wrong = next((name for name in pipeline.repeated if name not in known), None)
    if wrong is not None:
        raise PlanError(f"{wrong} cannot be made again by every stage (the inputs of the batch do not determine it): plan again")
    crosses = crossing(graph, chunks, pipeline.repeated)
    writer = _Writer(graph, candidate)
    made = []
    for chunk, receives, sends in zip(chunks, ((), *crosses), (*crosses, graph.results), strict=True):
        own = {name for index in chunk for name in graph.calls[index].outputs}
        calls = tuple(graph.calls[index] for index in chunk)
        read = {name for call in calls for name in call.inputs} | (set(graph.results) if chunk is chunks[-1] else set())
        missing = read & set(pipeline.repeated) - own
        made.append(ChunkCalls((*writer.repeat(missing, [known[name] for name in sorted(missing)]), *calls), receives, sends))
    blocks, plans = (*graph.blocks, *writer.blocks), (*candidate.blocks, *writer.plans)
    return Staged(replace(graph, blocks=blocks), replace(candidate, blocks=plans), tuple(made))


@dataclass(slots=True)
class _Writer:
    """Makes the blocks of repeated pieces, each once."""

    graph: Graph
    candidate: Candidate
    blocks: list[Block] = field(default_factory=list)
    plans: list[BlockPlan] = field(default_factory=list)
    known: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = field(default_factory=dict)

    def repeat(self, wanted: set[str], several: Sequence[Sequence[Piece]]) -> list[Call]:
        """Calls that make the `wanted` values."""
        found = joined(self.graph, several)
        needed, out = set(wanted), list[Call]()
        for piece in reversed(found):
            call = self._call(piece, needed)
            needed |= set(call.inputs)
            out.append(call)
        return out[::-1]

    def _call(self, piece: Piece, needed: set[str]) -> Call:
        call = self.graph.calls[piece.call]
        block, plan = self.graph.block(call.block), self.candidate.block(call.block)
        slots = [slot for slot, name in enumerate(call.outputs) if name in needed]
        inner = tuple(block.outputs[slot] for slot in slots)
        key = call.block, piece.nodes, inner
        taken = {each.name for each in (*self.graph.blocks, *self.blocks)}
        name = self.known.get(key) or fresh(f"{call.block}Tables", taken)
        made = part(name, block, plan, piece.nodes, inner, [plan.outputs[slot] for slot in slots])
        if key not in self.known:
            self.known[key] = name
            self.blocks.append(made.block)
            self.plans.append(made.plan)
        return made.call(call, [call.outputs[slot] for slot in slots])
