"""Rewrites an index that takes every position: ``mask[arange(B)[:, None, None, None], arange(S)]``, as mask functions of
transformers write it, is a view of the mask. As an index by position it would need the whole batch."""

from __future__ import annotations

from autopar.capture.flat import Lookup, Rewritten, node_like, node_rewrite, size_args
from autopar.ir.dims import Dim
from autopar.ir.graph import Node, Ref, Symbol

_VIEWS = ("aten.unsqueeze", "aten.reshape", "aten.view", "aten.expand")


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
    return (node_like(node, "aten.reshape", (node.args[0], size_args(result.shape)), result.name, result.shape),), {}


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
