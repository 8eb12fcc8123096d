"""Cuts the graph of a variant into the model chunks that the weights of the first program are on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.errors import PlanMismatch
from autopar.ir.graph import Call, Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.split_blocks import split_block
from autopar.ir.plan import Pipeline


def cut_like(graph: Graph, planned: Graph, pipeline: Pipeline) -> tuple[Graph, tuple[int, ...]]:
    """`graph`, with blocks split where a chunk ends inside of them, and the first call of every chunk but the first. PlanMismatch
    where its operations read the weights in another order than the chunks hold them."""
    holders: dict[str, list[int]] = {}
    for chunk, calls in enumerate(chunk_calls(planned, pipeline)):
        for index in calls:
            for name in planned.calls[index].parameters:
                holders.setdefault(name, []).append(chunk)
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


def _chunks_of_nodes(graph: Graph, holders: Mapping[str, list[int]]) -> Iterator[tuple[Call, list[int]]]:
    """The chunk of every operation of every call: the first that has what it reads, and is not before that of the operation
    before it. `holders` are the chunks of the calls that read a parameter: where as many calls read it here, one for one."""
    blocks = {block.name: block for block in graph.blocks}
    total = Counter(name for call in graph.calls for name in call.parameters)
    seen: Counter[str] = Counter()
    current = 0
    for call in graph.calls:
        block = blocks[call.block]
        names = {p.value.name: name for p, name in zip(block.parameters, call.parameters, strict=True)}
        seen.update(call.parameters)

        def chunks_of(name: str) -> set[int]:
            chunks = holders.get(name, [])
            return {chunks[seen[name] - 1]} if len(chunks) == total[name] else set(chunks)

        found = []
        for node in block.nodes:
            read = [names[operand] for operand in node.operands() if operand in names]
            able = set.intersection(*(chunks_of(name) for name in read)) if read else {current}
            later = [chunk for chunk in able if chunk >= current]
            if not later:
                raise PlanMismatch(f"it reads {read[0]} in another order than the pipeline's stages have the weights")
            current = min(later)
            found.append(current)
        yield call, found or [current]
