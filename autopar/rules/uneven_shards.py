"""Uneven shards of the batch: data ranks whose parts of it differ by one example (7 = 4 + 3).

A size is then a number of examples of this rank (``B``) where the data axis shards the dimension, and of all (``B_all``) where it
does not. What the data axis shards must consist of whole examples: its size is a multiple of ``B`` on every other axis' shard.

Before (dp=2)::

    %r: [B, 16, 8] S(0) = aten.reshape(%q, (<B>, 16, 8))
    %m: [] = aten.div.Tensor(%total, <16*B>)

After::

    %r: [B, 16, 8] = aten.reshape(%q, (<B>, 16, 8))
    %m: [] = aten.div.Tensor(%total, <16*B_all>)
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from autopar.errors import PlanError
from autopar.ir.dims import BATCH, Dim, as_sympy
from autopar.ir.graph import Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements, Shard, local_parts, local_shape
from autopar.ir.plan import Candidate
from autopar.operations.table import operation
from autopar.rules.localize import localize_uneven_args


def require_uneven(graph: Graph, candidate: Candidate) -> None:
    """PlanError where data ranks cannot have uneven shards of the batch at all."""
    ranks = candidate.mesh.size_of(DATA_AXIS)
    if candidate.micro_batches > 1 or candidate.pipeline.stages > 1:
        raise PlanError("micro-batches and pipelines take equal shards of the batch")
    if not graph.batch_is_symbolic:
        raise PlanError(f"{graph.name} was captured at a batch of {graph.batch} only")
    if candidate.batch < ranks:
        raise PlanError(f"{candidate.batch} examples leave some of dp={ranks} without one")
    for block in graph.blocks:
        for node in block.nodes:
            if operation(node.op).rank_statistics:
                raise PlanError(f"{node.name} ({node.source or node.op}) takes the statistics of a rank's examples")


def require_whole_examples(value: Value, placements: Placements, mesh: Mesh) -> None:
    """PlanError where a rank's shard of the value is not a number of whole examples, for any number of them."""
    shape, sharded = _without_data_axis(value, placements, mesh), _data_dim(value, placements, mesh)
    parts = local_parts(placements, mesh.sizes, mesh.index(DATA_AXIS)) if sharded is not None else 1
    batch = sympy.Symbol(BATCH, integer=True, positive=True)
    for dim, size in enumerate(shape):
        expression = as_sympy(size)
        if dim == sharded:
            expression = sympy.expand(expression / (parts * batch))
            fits = bool(expression.is_Integer)
        else:
            fits = sympy.fraction(sympy.together(expression))[1] == 1
        if not fits:
            raise PlanError(f"%{value.name} {' '.join(map(str, placements))} of size {size} does not consist of whole examples")


def with_uneven_sizes(node: Node, placements: Mapping[str, Placements], mesh: Mesh) -> Node:
    """The node that one rank runs. Its sizes are global before; the outputs keep their shapes."""
    results = [_without_data_axis(value, placements[value.name], mesh) for value in node.outputs]
    return localize_uneven_args(node, results, _data_dim(node.outputs[0], placements[node.outputs[0].name], mesh))


def _without_data_axis(value: Value, placements: Placements, mesh: Mesh) -> tuple[Dim, ...]:
    """The shape of the shard on all other axes."""
    sizes = [1 if axis.name == DATA_AXIS else axis.size for axis in mesh.axes]
    return local_shape(value.shape, placements, sizes)


def _data_dim(value: Value, placements: Placements, mesh: Mesh) -> int | None:
    """The dimension that the data axis shards."""
    where = placements[mesh.index(DATA_AXIS)]
    return where.dim % len(value.shape) if isinstance(where, Shard) else None
