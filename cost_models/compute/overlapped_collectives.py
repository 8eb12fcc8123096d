"""Collectives inside operations (all-to-all of expert dispatch, all-gather of context-parallel attention, ...), as the rules'
named functions tell them, and the imbalance of their work. And the exposed time of collectives that overlap with compute: those
that are decomposed to overlap with the products beside them (asynchronous tensor parallelism), those inside of an operation that
computes on one block while the next is sent (ring attention), and those of a backward that run beside gradients of weights, which
nothing waits for.

A product whose operand is gathered starts on the shards that have arrived; a product whose result is reduced sends its shards as
they are ready (Wang et al., ASPLOS 2023, "Overlap communication with dependent computation via decomposition"). Of ``p`` shards
the first or the last has no compute to overlap with, so at most ``1 - 1/p`` of a collective is hidden, and no more than the
compute beside it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from autopar.cost_models.comm.shard_groups import operation_collective_seconds
from autopar.cost_models.compute.loss_chunks import chunk_count
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Block, Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import NodePlan
from autopar.operations.notation.rule import OperationCollective
from autopar.operations.table import operation

WEIGHT_GRADIENT_SHARE = 0.5
"""The share of a linear's backward that is the gradient of its weight (Qi et al., arXiv 2401.10241, section 2)."""

StreamSegment = tuple[float, frozenset[str], float]
"""Seconds of the main stream, the links that it uses meanwhile (none: compute), and the share of it that may overlap with
compute."""


def weight_gradient_nodes(block: Block) -> frozenset[str]:
    """Return the linears whose weight trains: the gradient of the weight may be computed later than that of the input."""
    trained = {parameter.value.name for parameter in block.parameters if parameter.trainable and not parameter.buffer}
    linears = [node for node in block.nodes if operation(node.op).splits_backward and len(node.operands()) > 1]
    return frozenset(node.name for node in linears if node.operands()[1] in trained)


def exposed_blocks(seconds: float, compute_seconds: float, blocks: int) -> float:
    """Return the exposed seconds of a collective of so many blocks inside of an operation: all but the first one hide behind its
    compute."""
    return max(0.0, seconds - compute_seconds * (blocks - 1) / blocks)


def exposed_segments(stream: Sequence[StreamSegment]) -> list[tuple[float, frozenset[str]]]:
    """The main stream without what overlaps."""
    exposed = exposed_seconds(stream)
    return [(seconds, links) for seconds, (_, links, _) in zip(exposed, stream, strict=True) if seconds > 0]


def exposed_seconds(stream: Sequence[StreamSegment]) -> list[float]:
    """Return what is left of each segment: a collective overlaps with the compute before it, then with the compute after it;
    compute hides no more than it takes."""
    unused_compute = [0.0 if links else seconds for seconds, links, _ in stream]
    out = []
    for index, (seconds, _, share) in enumerate(stream):
        hidden = 0.0
        for beside in (index - 1, index + 1) if share else ():
            if 0 <= beside < len(stream):
                more = min(seconds * share - hidden, unused_compute[beside])
                unused_compute[beside] -= more
                hidden += more
        out.append(seconds - hidden)
    return out


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
