"""Rewrites an index that takes every position: ``mask[arange(B)[:, None, None, None], arange(S)]``, as mask functions of
transformers write it, is a view of the mask. As an index by position it would need the whole batch."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.flat import FlatGraph, node_like, rewrite_nodes, size_args
from autopar.ir.dims import Dim
from autopar.ir.graph import Node, Ref, Symbol

_VIEWS = ("aten.unsqueeze", "aten.reshape", "aten.view", "aten.expand")


def whole_indices(flat: FlatGraph) -> FlatGraph:
    """``x[i, j, ...]`` becomes a reshape of `x` where each index is all positions of its dimension, along a dimension of its own
    of the result, in the order of those of `x`."""
    values, producers = flat.values(), flat.producers()

    def counted(name: str) -> Dim | None:
        """The number n of ``arange(n)``, of which the value is a view with one dimension that is not 1."""
        shape = values[name].shape
        if sum(size != 1 for size in shape) > 1:
            return None
        node = producers.get(name)
        while node is not None and node.op in _VIEWS:
            node = producers.get(node.operands()[0])
        if node is None or node.op != "aten.arange" or len(node.args) != 1:
            return None
        end = node.args[0].dim if isinstance(node.args[0], Symbol) else node.args[0]
        return end if isinstance(end, int | str) and node.outputs[0].shape == (end,) else None

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != "aten.index.Tensor" or not isinstance(node.args[1], tuple) or not isinstance(node.args[0], Ref):
            return None
        source, result = values[node.args[0].name], node.outputs[0]
        names = [arg.name for arg in node.args[1] if isinstance(arg, Ref)]
        if len(names) != len(source.shape) or len(names) != len(node.args[1]):
            return None
        if any(counted(name) != size for name, size in zip(names, source.shape, strict=True)):
            return None
        places = []
        for name in names:
            shape = values[name].shape
            places += [len(result.shape) - len(shape) + place for place, size in enumerate(shape) if size != 1]
        if places != sorted(set(places)):
            return None
        view = node_like(node, "aten.reshape", (node.args[0], size_args(result.shape)), result.name, result.shape)
        return (view,), {}

    return rewrite_nodes(flat, step)
