"""Which values every stage makes for itself instead of receiving them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.stages import piece_seconds, send_seconds, stage_link
from autopar.cost_models.trace import Run
from autopar.ir.chunks import chunk_calls
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.stages import crossing, joined, repeatable


def repeated_values(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts]
) -> tuple[str, ...]:
    """Of the values that cross a cut and that inputs determine, those that are made in less time than they are sent: seconds of
    the nodes on every chunk that reads one, against its bytes over the link at each cut that it crosses."""
    chunks = chunk_calls(graph, candidate.pipeline)
    crossings = crossing(graph, chunks)
    able = repeatable(graph)
    names = [name for name in able if any(name in each for each in crossings)]
    if not names:
        return ()
    runs = {name: Run.of(costs[name], candidate.block(name)) for name in costs}
    link = stage_link(cluster, candidate, 0, 1)
    out = []
    for name in names:
        readers = sum(any(name in graph.calls[index].inputs for index in chunk) for chunk in chunks[1:])
        making = readers * sum(piece_seconds(graph, piece, runs) for piece in joined(graph, [able[name]]))
        others = {other for each in crossings for other in each if other != name}
        sending = sum(
            send_seconds(graph, runs, chunk[0], others, link)
            for chunk, each in zip(chunks[1:], crossings, strict=True)
            if name in each
        )
        if making <= sending:
            out.append(name)
    return tuple(out)
