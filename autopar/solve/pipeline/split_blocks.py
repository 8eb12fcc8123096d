"""Blocks that take longer than a model chunk should are split before the stage partition.

A block may be split where one tensor with a gradient crosses (between the layers of a ConvNet, the halves of a transformer's
layer). All calls of a block are divided alike, at about equal shares of its work by data sheet: the dynamic program decides which
of these places become cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.pipeline.split_blocks import single_tensor_cuts, split_block

_DEFAULT_CHUNKS = 8
"""Chunks that graphs are split for at most, where no degree is forced."""

_MAX_SHARE = 1.2
"""A block that takes more than this share of a chunk is divided, into parts of half a chunk."""


def with_split_blocks(graph: Graph, cluster: Cluster, force: Mapping[str, int]) -> Graph:
    """Split blocks of `graph` for the pipelines that are asked for, or up to `_DEFAULT_CHUNKS` of the cluster's devices."""
    chunks = force["pp"] * force.get("virtual", 1) if force.get("pp", 1) > 1 else min(_DEFAULT_CHUNKS, cluster.size)
    operations = sum(len(graph.block(call.block).nodes) for call in graph.calls)
    if chunks < 2 or chunks > operations or "virtual" not in force and len(graph.calls) > 4 * chunks:
        return graph
    work = {block.name: _node_seconds(block, graph.batch, cluster) for block in graph.blocks}
    total = sum(sum(work[call.block]) for call in graph.calls)
    for block in graph.blocks:
        seconds = sum(work[block.name])
        if seconds * chunks <= _MAX_SHARE * total:
            continue
        places = _places(block, work[block.name], ceil(2 * chunks * seconds / total))
        if places:
            graph = split_block(graph, block.name, places)
    return graph


def _places(block: Block, seconds: list[float], parts: int) -> list[int]:
    """Return the narrow places that are nearest to equal shares."""
    cuts = single_tensor_cuts(block)
    sums = [0.0]
    for each in seconds:
        sums.append(sums[-1] + each)
    targets = [sums[-1] * part / parts for part in range(1, parts)]
    return sorted({min(cuts, key=lambda place: abs(sums[place] - at)) for at in targets}) if cuts else []


def _node_seconds(block: Block, batch: int, cluster: Cluster) -> list[float]:
    """Return the seconds of each operation on one device, forward and backward, from the data sheet."""
    costs = BlockCosts(block, Mesh((Axis(DATA_AXIS, 1),)), batch, replace(cluster, size=1))
    device = cluster.device
    out = []
    for node in block.nodes:
        profile = costs.profile(node.name)
        flops = profile.forward_flops + profile.backward_flops
        moved = 3 * (sum(profile.operand_bytes) + sum(profile.result_bytes))
        out.append(max(flops / device.matrix_peak_flops_per_second(profile.dtype), moved / device.bandwidth_bytes_per_second))
    return out
