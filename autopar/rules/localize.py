"""Localizes operations: turns an operation on global shapes into the one that a rank runs on its local shards.

Uneven shards of the batch: data ranks whose parts of it differ by one example (7 = 4 + 3).

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sympy

from autopar.errors import PlanError
from autopar.ir.dims import BATCH, Dim, Shape, as_dim, as_sympy
from autopar.ir.graph import Arg, Graph, Node, Symbol, Value, map_leaves, size_argument
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements, Shard, local_parts, local_shape
from autopar.ir.plan import Candidate
from autopar.operations.notation.rule import argument
from autopar.operations.table import operation


def localize_args(node: Node, result_shapes: Sequence[Shape], data_size: int = 1, parts: int = 1) -> Node:
    """The node that one rank runs: sizes in its arguments, and the shapes of its outputs, become local.

    `result_shapes` are the local shapes of the outputs. `data_size` is the size of the data axis: a local ``B`` is the batch of
    one data-parallel rank, so numbers that stay global (a divisor ``B*S``) become ``data_size*B*S``; with `parts` micro-batches a
    local ``B`` is that of one micro-batch, and such a number becomes ``data_size*parts*B*S``.
    """
    outputs = tuple(replace(value, shape=tuple(shape)) for value, shape in zip(node.outputs, result_shapes, strict=True))
    local = _local_sizes(node, result_shapes, data_size)
    return replace(_with_sizes(node, lambda arg: _whole(arg, data_size * parts), local), outputs=outputs)


def localize_uneven_args(node: Node, result_shapes: Sequence[Shape], sharded: int | None) -> Node:
    """The node that one rank runs where data ranks have uneven shards of the batch. `result_shapes` are those of the outputs on
    the shards of all other axes: a ``B`` in dimension `sharded`, which the data axis shards, is the batch of this rank; any other
    one is the whole batch, as in numbers that stay global. The outputs keep their shapes."""
    packet, record = node.op.split(".")[1], operation(node.op)
    named = argument(node, 1 if packet == "slice" else 2, "dim", 0) or 0
    if record.groups_at is not None:
        named = _channel_dim(node, record.groups_at)
    only = named % max(1, len(result_shapes[0])) if isinstance(named, int) and record.sizes_at is None else None

    def marked(arg: Arg, dim: int | None) -> Arg:
        if isinstance(arg, tuple):
            return tuple(marked(item, index if only is None else only) for index, item in enumerate(arg))
        return replace(arg, whole=dim is None or dim != sharded) if isinstance(arg, Symbol) else arg

    local = {place: marked(arg, only) for place, arg in _local_sizes(node, result_shapes, 1).items()}
    return _with_sizes(node, lambda arg: replace(arg, whole=True) if isinstance(arg, Symbol) else arg, local)


def _local_sizes(node: Node, result_shapes: Sequence[Shape], data_size: int) -> dict[tuple[int, str], Arg]:
    """Return the arguments, by position and name, that are sizes of the results, which are local."""
    packet, record = node.op.split(".")[1], operation(node.op)
    local: dict[tuple[int, str], Arg] = {}
    if record.sizes_at is not None:
        local[record.sizes_at, "size"] = _numbers(result_shapes[0])
    elif packet == "slice":
        local = _slice(node, result_shapes[0], data_size)
    elif packet in ("split", "split_with_sizes"):
        local = _split(node, result_shapes, data_size)
    elif packet == "repeat_interleave" and "output_size" in dict(node.kwargs):
        local[len(node.args), "output_size"] = size_argument(result_shapes[0][_dim(argument(node, 2, "dim", 0) or 0)])  # type: ignore[index]
    elif packet.startswith("upsample") and isinstance(argument(node, 1, "output_size", None), tuple):
        local[1, "output_size"] = _numbers(result_shapes[0][2:])
    elif record.groups_at is not None:
        local = _groups(node, result_shapes[0], record.groups_at, data_size)
    return local


def _with_sizes(node: Node, whole: Callable[[Arg], Arg], local: Mapping[tuple[int, str], Arg]) -> Node:
    """The node with `local` arguments, and what `whole` makes of the parts of all others."""
    found = {at: new for (at, _), new in local.items()}
    args = tuple(found[index] if index in found else map_leaves(whole, arg) for index, arg in enumerate(node.args))
    names = {name: new for (at, name), new in local.items() if at >= len(args)}
    kwargs = tuple((name, names[name] if name in names else map_leaves(whole, arg)) for name, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)


def _numbers(shape: Shape) -> tuple[Arg, ...]:
    return tuple(map(size_argument, shape))


def scale_batch(dim: Dim, data_size: int) -> Dim:
    """A size in terms of the global batch, in terms of the batch of one data-parallel rank."""
    if isinstance(dim, int) or data_size == 1:
        return dim
    batch = sympy.Symbol(BATCH, integer=True, positive=True)
    return as_dim(as_sympy(dim).subs(batch, data_size * batch))


def _whole(arg: Arg, data_size: int) -> Arg:
    return replace(arg, dim=scale_batch(arg.dim, data_size)) if isinstance(arg, Symbol) else arg


def _dim(arg: Arg) -> Dim:
    return arg.dim if isinstance(arg, Symbol) else int(arg)  # type: ignore[arg-type]


def _slice(node: Node, local: Shape, data_size: int) -> dict[tuple[int, str], Arg]:
    """Start and end of a sharded dimension shrink with the result; otherwise they stay."""
    dim = _dim(argument(node, 1, "dim", 0))
    assert isinstance(dim, int)
    whole, size = node.outputs[0].shape[dim], local[dim]
    if scale_batch(whole, data_size) == size:
        return {}
    start = argument(node, 2, "start", 0)
    begin = as_sympy(_dim(start if start is not None else 0)) * as_sympy(size) / as_sympy(whole)
    return {(2, "start"): size_argument(as_dim(begin)), (3, "end"): size_argument(as_dim(begin + as_sympy(size)))}


def _split(node: Node, local: Sequence[Shape], data_size: int) -> dict[tuple[int, str], Arg]:
    dim = _dim(argument(node, 2, "dim", 0))
    assert isinstance(dim, int)
    sizes = [shape[dim] for shape in local]
    if all(scale_batch(value.shape[dim], data_size) == size for value, size in zip(node.outputs, sizes, strict=True)):
        return {}
    if isinstance(node.args[1], tuple):
        return {(1, "split_sizes"): _numbers(tuple(sizes))}
    return {(1, "split_size"): size_argument(sizes[0])}


def _groups(node: Node, local: Shape, at: int, data_size: int) -> dict[tuple[int, str], Arg]:
    """The groups of channels of one rank: in proportion to its channels of the result."""
    name = "num_groups" if at == 1 else "groups"
    groups, dim = argument(node, at, name, 1), _channel_dim(node, at)
    if groups == 1:
        return {}
    every, whole = (as_sympy(scale_batch(each, data_size)) for each in (_dim(groups), node.outputs[0].shape[dim]))
    return {(at, name): size_argument(as_dim(every * as_sympy(local[dim]) / whole))}


def _channel_dim(node: Node, at: int) -> int:
    """The dimension of the channels of the result, where argument `at` is their number of groups."""
    packet, rank = node.op.split(".")[1], len(node.outputs[0].shape)
    if at == 1:
        return 1
    spatial = len(node.args[3]) if packet == "convolution" else int(packet[-2])  # type: ignore[arg-type]
    return rank - spatial - 1


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
