"""The model chunks of a pipeline in the graph of a variant: it is cut where the weights of the first program are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from autopar.errors import PlanMismatch
from autopar.ir.graph import Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.split_blocks import split_block
from autopar.ir.plan import Pipeline


def cut_like(graph: Graph, planned: Graph, pipeline: Pipeline) -> tuple[Graph, tuple[int, ...]]:
    """Return `graph`, with blocks split where a chunk ends inside of them, and the first call of every chunk but the first.
    PlanMismatch where its operations read the weights in another order than the chunks hold them."""
    holders: dict[str, list[int]] = {}
    for chunk, calls in enumerate(chunk_calls(planned, pipeline)):
        for index in calls:
            for name in planned.calls[index].parameters:
                holders.setdefault(name, []).append(chunk)
    parts = pipeline.stages * pipeline.virtual
    places: dict[str, set[int]] = {}
    for call, chunks in zip(graph.calls, _chunks_of_nodes(graph, holders, parts), strict=True):
        places.setdefault(call.block, set()).update(at for at in range(1, len(chunks)) if chunks[at] != chunks[at - 1])
    for block, inside in places.items():
        if inside:
            graph = split_block(graph, block, sorted(inside))
    firsts = [chunks[0] for chunks in _chunks_of_nodes(graph, holders, parts)]
    if set(firsts) != set(range(parts)):
        raise PlanMismatch(f"it computes nothing in {parts - len(set(firsts))} of the {parts} model chunks of the pipeline")
    return graph, tuple(firsts.index(chunk) for chunk in range(1, parts))


def _chunks_of_nodes(graph: Graph, holders: Mapping[str, list[int]], parts: int) -> list[list[int]]:
    """The chunk of every operation of every call, of a call without operations that of the one before it: the first that has
    what it reads, and is not before that of the operation before it."""
    able = list(_able_chunks(graph, holders, parts))
    chunks: list[int] = []
    for options, read in able:
        later = [chunk for chunk in options if not chunks or chunk >= chunks[-1]]
        if not later:
            raise PlanMismatch(f"it reads {read} in another order than the pipeline's stages have the weights")
        chunks.append(min(later))
    _give_to_empty([options for options, _ in able], chunks, parts)
    out, start = [], 0
    for call in graph.calls:
        end = start + len(graph.block(call.block).nodes)
        out.append(chunks[start:end] or chunks[max(0, start - 1) : start] or [0])
        start = end
    return out


def _able_chunks(graph: Graph, holders: Mapping[str, list[int]], parts: int) -> Iterator[tuple[Collection[int], str]]:
    """The chunks that have what an operation reads, and the first parameter that it reads, for all operations in order. `holders`
    are the chunks of the calls that read a parameter: where as many calls read it here, one for one."""
    total = Counter(name for call in graph.calls for name in call.parameters)
    seen: Counter[str] = Counter()
    for call in graph.calls:
        block = graph.block(call.block)
        names = {p.value.name: name for p, name in zip(block.parameters, call.parameters, strict=True)}
        seen.update(call.parameters)

        def chunks_of(name: str) -> set[int]:
            chunks = holders.get(name, [])
            return {chunks[seen[name] - 1]} if len(chunks) == total[name] else set(chunks)

        for node in block.nodes:
            read = [names[operand] for operand in node.operands() if operand in names]
            able = set.intersection(*(chunks_of(name) for name in read)) if read else range(parts)
            yield able, next(iter(read), "")


def _give_to_empty(able: list[Collection[int]], chunks: list[int], parts: int) -> None:
    """Move operations that need no weights of their chunk to chunks that have none: those right before the operations of the
    next chunk. A stage may hold the loss alone, or weights that this graph does not read."""
    for empty in reversed(range(parts)):
        if empty in chunks:
            continue
        end = next((at for at, chunk in enumerate(chunks) if chunk > empty), len(chunks))
        start = end
        while start > empty and empty in able[start - 1]:  # each chunk before it needs an operation too
            start -= 1
        chunks[start:end] = [empty] * (end - start)
