"""Values (masks, rotary tables) that every pipeline stage computes itself instead of receiving them."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import slice_forward_seconds
from autopar.cost_models.step.stage_p2p import send_seconds, stage_link
from autopar.ir.graph import Graph
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import crossing_values, joined_slices, repeatable_values
from autopar.ir.plan import Candidate


def values_worth_repeating(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts]
) -> tuple[str, ...]:
    """Return the values that cross a cut, are determined by inputs, and are made in less time than they are sent: seconds of the
    nodes on every chunk that reads one, against its bytes over the link at each cut that it crosses."""
    chunks = chunk_calls(graph, candidate.pipeline)
    crossings = crossing_values(graph, chunks)
    repeatable = repeatable_values(graph)
    names = [name for name in repeatable if any(name in each for each in crossings)]
    if not names:
        return ()
    runs = {name: CallTrace.of(costs[name], candidate.block(name)) for name in costs}
    link = stage_link(cluster, candidate.mesh.size, 0, 1)
    out = []
    for name in names:
        readers = sum(any(name in graph.calls[index].inputs for index in chunk) for chunk in chunks[1:])
        making = readers * sum(slice_forward_seconds(graph, piece, runs) for piece in joined_slices(graph, [repeatable[name]]))
        others = {other for each in crossings for other in each if other != name}
        sending = sum(
            send_seconds(graph, runs, chunk[0], others, link)
            for chunk, each in zip(chunks[1:], crossings, strict=True)
            if name in each
        )
        if making <= sending:
            out.append(name)
    return tuple(out)
