"""Collectives inside operations (all-to-all of expert dispatch, all-gather of context-parallel attention, ...), as the rules'
named functions tell them; and the imbalance of their work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from autopar.cost_models.comm.shard_groups import operation_collective_seconds
from autopar.cost_models.compute.loss_chunks import chunk_count
from autopar.cost_models.compute.overlapped_collectives import exposed_blocks
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import NodePlan
from autopar.operations.notation.rule import OperationCollective
from autopar.operations.table import operation


def inner_collectives(node: Node, values: Mapping[str, Value], function: str) -> tuple[tuple[str, OperationCollective], ...]:
    """Collectives that named function `function` runs where its factor is sharded: (factor, collective) pairs, from the rules."""
    named = operation(node.op).function(function)
    shapes = tuple(values[name].shape for name in node.operands())
    listed = () if named.collectives is None else named.collectives(node, shapes)
    return tuple((collective.factor or named.factor, collective) for collective in listed)


def work_imbalance(node: Node, values: Mapping[str, Value], plan: NodePlan, mesh: Mesh) -> float:
    """Work of the busiest rank over the mean (causal attention over shards of a sequence)."""
    named = operation(node.op).function(plan.function)
    if named.imbalance is None:
        return 1.0
    shapes = tuple(values[name].shape for name in node.operands())
    return prod(
        named.imbalance(node, shapes, size)
        for sharded, size in zip(plan.factors, mesh.sizes, strict=True)
        if sharded.partition(" ")[0] == named.factor
    )


def exposed_collective_seconds(
    node: Node, values: Mapping[str, Value], plan: NodePlan, mesh: Mesh, batch: int, cluster: Cluster,
    work: Sequence[int], computing: tuple[float, float],
) -> tuple[tuple[float, ...], tuple[float, ...]]:  # fmt: skip
    """Exposed seconds per axis, forward and backward, of the collectives inside the operation. `work` is how many ways each axis
    shards the work, `computing` the seconds of compute, forward and backward."""
    exposed, overlapped = ([[0.0] * len(mesh.sizes) for _ in range(2)] for _ in range(2))
    chunks = chunk_count(node, values, plan, mesh.sizes, batch)
    for factor, collective in inner_collectives(node, values, plan.function):
        for axis, sharded in enumerate(plan.factors):
            if sharded.partition(" ")[0] != factor:
                continue
            full = float(dims.numel(collective.shape, batch) * itemsize(collective.dtype)) / chunks
            side = (overlapped if collective.overlapped else exposed)[collective.backward]
            operand = plan.operands[collective.operand] if collective.operand >= 0 else None
            cuts = work if operand is None else [size if isinstance(operand[at], Shard) else 1 for at, size in enumerate(work)]
            side[axis] += chunks * operation_collective_seconds(collective, full, axis, plan.factors, cuts, mesh, cluster)
    for seconds, hidden, compute in zip(exposed, overlapped, computing, strict=True):
        for axis, size in enumerate(mesh.sizes):
            seconds[axis] += exposed_blocks(hidden[axis], compute, size)
    return tuple(exposed[0]), tuple(exposed[1])
