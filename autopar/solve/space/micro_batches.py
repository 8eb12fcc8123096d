"""The numbers of micro-batches that are tried: whether the batch may be divided at all, and by what."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import PlanError
from autopar.ir.batch_totals import BatchAxisPlacements, batch_totals, why_fixed
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS, Mesh
from autopar.rules.registry import Registry
from autopar.solve.problem.boundary import block_slots
from autopar.solve.problem.data_axis import AxisStrategies
from autopar.solve.space.meshes import divisors

MICRO = "micro"
"""Forces the examples of one micro-batch on one data rank."""


def why_one_micro_batch(graph: Graph, registry: Registry) -> str:
    """Say in a sentence what forces one micro-batch; empty where any number gives the loss and gradients of the batch."""
    if not graph.batch_is_symbolic:
        return why_fixed(graph)
    strategies = AxisStrategies(graph, registry)
    boundary, data_axis = strategies.boundary, strategies.on_data_axis(2)

    def along(block: Block) -> BatchAxisPlacements:
        chosen = {node.name: data_axis.strategies[block.name, node.name] for node in block.nodes}
        places = [(slot, name, data_axis.classes[boundary.classes[slot]]) for slot, name in block_slots(block)]
        produced = {name: at for slot, name, at in places if slot.side != "out"}
        for node in block.nodes:
            produced |= {value.name: at for value, at in zip(node.outputs, chosen[node.name].results, strict=True)}
        ends = tuple(at for slot, _, at in places if slot.side == "out")
        return BatchAxisPlacements(produced, {name: strategy.operands for name, strategy in chosen.items()}, ends)

    try:
        batch_totals(graph, along)
    except PlanError as error:
        return str(error).removesuffix(": it takes one micro-batch")
    return ""


def expert_axis_fits(mesh: Mesh, batch: int, micro_batches: int, force: Mapping[str, int], experts: bool) -> bool:
    """Return whether `EXPERT_AXIS` can shard each of so many micro-batches. A mesh without it is for batches that it cannot shard
    at all: where only some micro-batches are too small for it, larger ones remain, or a forced ``tp``."""
    each = batch // mesh.size_of(DATA_AXIS)
    if mesh.size_of(EXPERT_AXIS) > 1:
        return each // micro_batches % mesh.size_of(EXPERT_AXIS) == 0
    model = mesh.size // mesh.size_of(DATA_AXIS)
    return not experts or model == 1 or "tp" in force or each % model != 0


def micro_batch_counts(batch: int, data: int, force: Mapping[str, int], one_micro_batch: bool) -> tuple[int, ...]:
    """The numbers of micro-batches of each data rank: every divisor of its batch, or only one."""
    each = batch // data
    counts = [1] if one_micro_batch else divisors(each)
    return tuple(count for count in counts if each // count == force.get(MICRO, each // count))
