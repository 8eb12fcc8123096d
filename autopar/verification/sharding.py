"""The tensors that a plan shards. One that shards nothing computes the whole on every rank, and proves nothing when it equals one
process."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import BlockPlan, Candidate
from autopar.rules.expand import block_strategies
from autopar.rules.registry import Registry


def shards_nothing(candidate: Candidate) -> bool:
    """Return whether every rank computes the whole model on whole tensors."""
    sizes = candidate.mesh.sizes
    split = any(
        isinstance(place, Shard) and size > 1
        for block in candidate.blocks
        for placements in _placements(block)
        for place, size in zip(placements, sizes, strict=True)
    )
    return not split and candidate.pipeline.stages == 1 and not (candidate.mesh.size_of(DATA_AXIS) > 1 and _has_state(candidate))


def _placements(block: BlockPlan) -> Iterator[Placements]:
    yield from (*block.inputs, *block.parameters, *block.outputs)
    for node in block.nodes:
        yield from (*node.operands, *node.results)


def _has_state(candidate: Candidate) -> bool:
    """Return whether ZeRO shards state over the data axis."""
    return any(block.zero and block.parameters for block in candidate.blocks)


def sharding_force(graph: Graph, devices: int, registry: Registry) -> str:
    """The ``--force`` with which so many devices would shard something of the graph; empty where nothing does."""
    axes = (DATA_AXIS, "tp") if graph.batch % devices == 0 else ("tp",)
    able = (axis for axis in axes if devices > 1 and _can_shard(graph, devices, registry, axis == DATA_AXIS))
    return next((f"{axis}={devices}" for axis in able), "")


def _can_shard(graph: Graph, devices: int, registry: Registry, data: bool) -> bool:
    return any(
        isinstance(place, Shard)
        for block in graph.blocks
        for strategies in block_strategies(
            block, devices, batch_axis=data, batch_is_symbolic=graph.batch_is_symbolic, registry=registry
        ).values()
        for strategy in strategies
        for place in (*strategy.operands, *strategy.results)
    )


def untested(graph: Graph, candidate: Candidate, registry: Registry) -> str:
    """A line where a plan shards nothing, with what would; empty for a plan that does."""
    if not shards_nothing(candidate):
        return ""
    force = sharding_force(graph, candidate.devices, registry)
    remedy = f"--force {force} shards it" if force else "no --force shards it on these devices"
    remedy = remedy if candidate.devices > 1 else "take --cluster local:4"
    return f"nothing was tested: this plan shards nothing, every rank computes the whole model ({remedy})"
