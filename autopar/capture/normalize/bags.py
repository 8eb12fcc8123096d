"""Rewrites ``embedding_bag`` over bags of one length as an embedding and a reduction, whose batch, rows and columns all shard;
embeddings with sparse gradients get dense ones."""

from __future__ import annotations

import warnings
from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rewrite_nodes
from autopar.ir.graph import Arg, Node, Ref

_OPS = ("aten.embedding_bag.padding_idx", "aten.embedding_bag", "aten._embedding_bag")
_REDUCTIONS = ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax")


@node_rewrite
def bags(node: Node, graph: Lookup) -> Rewritten | None:
    """A bag per row of a matrix of ids: what `torch.nn.functional.embedding_bag` makes of two dimensions."""
    values, producers = graph.values, graph.producers
    used = graph.uses
    if node.op not in _OPS:
        return None
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
    rows = node_like(
        node, "aten.embedding", (weight, Ref(ids.name)), f"{node.name}_rows", wide, out.dtype, out.differentiable
    )
    args: tuple[Arg, ...] = (Ref(rows.name), (1,))
    return (rows, replace(node, op=_REDUCTIONS[mode], args=args, kwargs=(), outputs=(out,))), {}


def dense_gradients(flat: FlatGraph) -> FlatGraph:
    """``sparse=True`` of embeddings and of bags is left out, with a warning that names them."""
    found: dict[str, Node] = {}

    def step(node: Node) -> Rewritten | None:
        place = 4 if node.op == "aten.embedding" else 5 if node.op in _OPS else len(node.args)
        if len(node.args) <= place or node.args[place] is not True:
            return None
        found.setdefault(node.module or node.source, node)
        return (replace(node, args=(*node.args[:place], False, *node.args[place + 1 :])),), {}

    rewritten = rewrite_nodes(flat, step)
    if found:
        warnings.warn(
            f"sparse=True of {', '.join(found)} ({next(iter(found.values())).source}) is ignored: their gradients are dense; use "
            "Adam or SGD, not SparseAdam",
            stacklevel=2,
        )
    return rewritten
