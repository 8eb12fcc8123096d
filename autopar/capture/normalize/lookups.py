"""Rewrites lookups: ``embedding_bag`` over bags of one length as an embedding and a reduction, whose batch, rows and columns all
shard; embeddings with sparse gradients, which get dense ones; and an index that takes every position,
``mask[arange(B)[:, None, None, None], arange(S)]`` of transformers' mask functions, as a view of the mask: as an index by
position it would need the whole batch. And assignments by a mask, ``h[mask] = token``, as a choice between both."""

from __future__ import annotations

import warnings
from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rewrite_nodes, size_args
from autopar.errors import CaptureError
from autopar.ir.dims import Dim
from autopar.ir.graph import Arg, Node, Ref, Symbol

_OPS = ("aten.embedding_bag.padding_idx", "aten.embedding_bag", "aten._embedding_bag")
_VIEWS = ("aten.unsqueeze", "aten.reshape", "aten.view", "aten.expand")
_REDUCTIONS = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax")


@node_rewrite
def bags(node: Node, graph: Lookup) -> Rewritten | None:
    """A bag per row of a matrix of ids: what `torch.nn.functional.embedding_bag` makes of two dimensions."""
    if node.op not in _OPS:
        return None
    values, producers, used = graph.values, graph.producers, graph.uses
    names = ("weight", "indices", "offsets", "scale", "mode", "sparse", "weights", "last", "padding")
    given = dict(zip(names, (*node.args, *(False, 0, False, None, False, -1)[len(node.args) - 3 :]), strict=False))
    weight, indices, offsets, mode = given["weight"], given["indices"], given["offsets"], given["mode"]
    assert isinstance(weight, Ref) and isinstance(indices, Ref) and isinstance(offsets, Ref) and isinstance(mode, int)
    flat_ids, steps = producers.get(indices.name), producers.get(offsets.name)
    padded = given["padding"] not in (None, -1)
    if flat_ids is None or steps is None or flat_ids.op != "aten.reshape" or not steps.op.startswith("aten.arange"):
        return None
    ids = values[flat_ids.operands()[0]]
    stride = steps.args[2] if len(steps.args) > 2 else 1
    if len(ids.shape) != 2 or stride != ids.shape[1] or padded or given["last"] or given["weights"] is not None:
        return None
    if any(used.get(value.name) for value in node.outputs[1:]):
        return None
    out = node.outputs[0]
    wide = (*ids.shape, values[weight.name].shape[1])
    rows = node_like(node, "aten.embedding", (weight, Ref(ids.name)), f"{node.name}_rows", wide, out.dtype, out.differentiable)
    args: tuple[Arg, ...] = (Ref(rows.name), (1,))
    return (rows, replace(node, op=_REDUCTIONS[mode], args=args, kwargs=(), outputs=(out,))), {}


def dense_gradients(flat: FlatGraph) -> FlatGraph:
    """``sparse=True`` of embeddings and of bags is left out, with a warning that names them. CaptureError for
    ``scale_grad_by_freq=True``."""
    found: dict[str, Node] = {}

    def step(node: Node) -> Rewritten | None:
        if node.op in ("aten.embedding", *_OPS) and node.args[3:4] == (True,):
            raise CaptureError(
                f"{node.source}: {node.module or 'an embedding'} has scale_grad_by_freq=True, which divides gradients by "
                "counts of the whole batch: leave it out"
            )
        place = 4 if node.op == "aten.embedding" else 5 if node.op in _OPS else len(node.args)
        if len(node.args) <= place or node.args[place] is not True:
            return None
        found.setdefault(node.module or node.source, node)
        return replace(node, args=(*node.args[:place], False, *node.args[place + 1 :]))

    rewritten = rewrite_nodes(flat, step)
    if found:
        warnings.warn(
            f"sparse=True of {', '.join(found)} ({next(iter(found.values())).source}) is ignored: their gradients are dense; use "
            "Adam or SGD, not SparseAdam",
            stacklevel=2,
        )
    return rewritten


@node_rewrite
def whole_indices(node: Node, graph: Lookup) -> Rewritten | None:
    """``x[i, j, ...]`` becomes a reshape of `x` where each index is all positions of its dimension, along a dimension of its own
    of the result, in the order of those of `x`."""
    if node.op != "aten.index.Tensor" or not isinstance(node.args[1], tuple) or not isinstance(node.args[0], Ref):
        return None
    source, result = graph.values[node.args[0].name], node.outputs[0]
    names = [arg.name for arg in node.args[1] if isinstance(arg, Ref)]
    if len(names) != len(source.shape) or len(names) != len(node.args[1]):
        return None
    if any(_counted(name, graph) != size for name, size in zip(names, source.shape, strict=True)):
        return None
    places = []
    for name in names:
        shape = graph.values[name].shape
        places += [len(result.shape) - len(shape) + place for place, size in enumerate(shape) if size != 1]
    if places != sorted(set(places)):
        return None
    return node_like(node, "aten.reshape", (node.args[0], size_args(result.shape)), result.name, result.shape)


@node_rewrite
def mask_assignments(node: Node, graph: Lookup) -> Rewritten | None:
    """``h[:, mask] = value`` becomes ``where(mask, value, h)``, where the value has no dimension of the places that are true."""
    if node.op != "aten.index_put" or len(node.operands()) != 3 or node.args[3:] not in ((), (False,)):
        return None
    x, indices, value = node.args[:3]
    whole, places, values = (graph.values[name] for name in node.operands())
    assert isinstance(indices, tuple)
    before, rank = len(indices) - 1, len(places.shape)
    after = len(whole.shape) - before - rank
    # a mask of a fixed number of examples would be broadcast, and a value of another dtype is cast to x's
    fits = isinstance(indices[-1], Ref) and places.shape == whole.shape[before : before + rank]
    if not fits or places.dtype != "bool" or values.dtype != whole.dtype or len(values.shape) > after:
        return None
    shape = (*places.shape, *[1] * after)
    over = node_like(node, "aten.reshape", (Ref(places.name), size_args(shape)), f"{node.name}_mask", shape, "bool", False)
    choice = replace(node, op="aten.where.self", args=(Ref(over.name), value, x))
    return (over, choice), {}


def _counted(name: str, graph: Lookup) -> Dim | None:
    """The number n of ``arange(n)``, of which the value is a view with one dimension that is not 1."""
    shape = graph.values[name].shape
    if sum(size != 1 for size in shape) > 1:
        return None
    node = graph.producers.get(name)
    while node is not None and node.op in _VIEWS:
        node = graph.producers.get(node.operands()[0])
    if node is None or node.op != "aten.arange" or len(node.args) != 1:
        return None
    end = node.args[0].dim if isinstance(node.args[0], Symbol) else node.args[0]
    return end if isinstance(end, int | str) and node.outputs[0].shape == (end,) else None
