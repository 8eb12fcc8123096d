"""Whether a model's batch may be divided into micro-batches, before anything is planned."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.graph import Block, Graph
from autopar.ir.micro_batching import BatchAxisPlacements, batch_totals, why_fixed
from autopar.rules.registry import Registry
from autopar.solve.problem.boundary import BlockBoundaries, Slot
from autopar.solve.problem.data_axis import propagate_data_axis


def why_one_micro_batch(graph: Graph, registry: Registry) -> str:
    """What forces one micro-batch, in a sentence; empty where any number of them gives the loss and gradients of the whole
    batch."""
    if not graph.batch_is_symbolic:
        return why_fixed(graph)
    boundary = BlockBoundaries(graph)
    found = propagate_data_axis(graph, boundary, 2, registry)

    def along(block: Block) -> BatchAxisPlacements:
        chosen = {node.name: found.strategies[block.name, node.name] for node in block.nodes}
        produced = {
            value.name: found.classes[boundary.classes[Slot(block.name, side, index)]]  # type: ignore[arg-type]
            for side, values in (("in", block.inputs), ("param", tuple(p.value for p in block.parameters)))
            for index, value in enumerate(values)
        }
        for node in block.nodes:
            produced |= {value.name: at for value, at in zip(node.outputs, chosen[node.name].results, strict=True)}
        ends = tuple(found.classes[boundary.classes[Slot(block.name, "out", index)]] for index in range(len(block.outputs)))
        return BatchAxisPlacements(produced, {name: strategy.operands for name, strategy in chosen.items()}, ends)

    try:
        batch_totals(graph, along)
    except PlanError as error:
        return str(error).removesuffix(": it takes one micro-batch")
    return ""
