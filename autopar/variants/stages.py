"""Cuts the graph of a variant into the model chunks that the weights of the first program are on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import PlanMismatch
from autopar.ir.graph import Call, Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.split_blocks import split_block
from autopar.ir.plan import Pipeline


def cut_like(graph: Graph, planned: Graph, pipeline: Pipeline) -> tuple[Graph, tuple[int, ...]]:
    """`graph`, with blocks split where a chunk ends inside of them, and the first call of every chunk but the first. PlanMismatch
    where its operations read the weights in another order than the chunks hold them."""
    holders: dict[str, set[int]] = {}
    for chunk, calls in enumerate(chunk_calls(planned, pipeline)):
        for index in calls:
            for name in planned.calls[index].parameters:
                holders.setdefault(name, set()).add(chunk)
    places: dict[str, set[int]] = {}
    for call, chunks in _chunks_of_nodes(graph, holders):
        places.setdefault(call.block, set()).update(at for at in range(1, len(chunks)) if chunks[at] != chunks[at - 1])
    for block, inside in places.items():
        if inside:
            graph = split_block(graph, block, sorted(inside))
    firsts = [chunks[0] for _, chunks in _chunks_of_nodes(graph, holders)]
    parts = pipeline.stages * pipeline.virtual
    if set(firsts) != set(range(parts)):
        raise PlanMismatch(f"it computes nothing in {parts - len(set(firsts))} of the {parts} model chunks of the pipeline")
    return graph, tuple(firsts.index(chunk) for chunk in range(1, parts))


def _chunks_of_nodes(graph: Graph, holders: Mapping[str, set[int]]) -> Iterator[tuple[Call, list[int]]]:
    """The chunk of every operation of every call: the first that has what it reads, and is not before that of the operation
    before it."""
    blocks = {block.name: block for block in graph.blocks}
    current = 0
    for call in graph.calls:
        block = blocks[call.block]
        names = {p.value.name: name for p, name in zip(block.parameters, call.parameters, strict=True)}
        found = []
        for node in block.nodes:
            read = [names[operand] for operand in node.operands() if operand in names]
            able = set.intersection(*(holders.get(name, set()) for name in read)) if read else {current}
            later = [chunk for chunk in able if chunk >= current]
            if not later:
                raise PlanMismatch(f"it reads {read[0]} in another order than the pipeline's stages have the weights")
            current = min(later)
            found.append(current)
        yield call, found or [current]
