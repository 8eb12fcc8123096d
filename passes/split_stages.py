"""Splits the calls of the model into the model chunks of a pipeline, each with the values that it receives and sends.

Before (split after layer 0; `cos` has no gradient and depends on the inputs of the batch only, so the plan lets each chunk repeat
its computation instead of sending it)::

    hidden, cos = Prologue(ids); h0 = Layer[0](hidden, cos); h1 = Layer[1](h0, cos); loss = Epilogue(h1, labels)

After::

    chunk 0: hidden, cos = Prologue(ids); h0 = Layer[0](hidden, cos)          sends h0
    chunk 1: cos = PrologueRepeated(ids); h1 = Layer[1](h0, cos); ...           receives h0
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.ir.graph import Call, Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import check_chunk_borders, crossing_values, repeatable_values
from autopar.ir.plan import Candidate
from autopar.passes.extract_block import RepeatedBlocks


@dataclass(frozen=True, slots=True)
class ChunkCalls:
    """The calls of a model chunk in order, and the values that it receives from the previous one and sends to the next."""

    calls: tuple[Call, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkedGraph:
    """A graph and its plan, extended by the blocks of repeated computations, and the model chunks."""

    graph: Graph
    candidate: Candidate
    chunks: tuple[ChunkCalls, ...]


def split_stages(graph: Graph, candidate: Candidate) -> ChunkedGraph:
    """Return the model chunks in the model's order; for one stage, one chunk of all calls. PlanError where that is impossible."""
    pipeline = candidate.pipeline
    if pipeline.stages == 1:
        return ChunkedGraph(graph, candidate, (ChunkCalls(graph.calls, (), graph.results),))
    chunks = chunk_calls(graph, pipeline)
    check_chunk_borders(graph, chunks)
    repeatable = repeatable_values(graph)
    wrong = next((name for name in pipeline.repeated if name not in repeatable), None)
    if wrong is not None:
        raise PlanError(
            f"{wrong} cannot be repeated by every stage (it depends on more than the inputs of the batch): plan again"
        )
    crosses = crossing_values(graph, chunks, pipeline.repeated)
    repeats = RepeatedBlocks(graph, candidate)
    chunk_values = []
    for chunk, receives, sends in zip(chunks, ((), *crosses), (*crosses, graph.results), strict=True):
        own = {name for index in chunk for name in graph.calls[index].outputs}
        calls = tuple(graph.calls[index] for index in chunk)
        read = {name for call in calls for name in call.inputs} | (set(graph.results) if chunk is chunks[-1] else set())
        missing = read & set(pipeline.repeated) - own
        chunk_values.append(
            ChunkCalls((*repeats.repeat(missing, [repeatable[name] for name in sorted(missing)]), *calls), receives, sends)
        )
    blocks, plans = (*graph.blocks, *repeats.blocks), (*candidate.blocks, *repeats.plans)
    return ChunkedGraph(replace(graph, blocks=blocks), replace(candidate, blocks=plans), tuple(chunk_values))
