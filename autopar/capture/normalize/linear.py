"""Rewrites matrix products between reshapes to ``linear`` and ``linear_kn``, which keep their batch dimensions."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.flat import Lookup, Rewritten, node_rewrite, size_args
from autopar.ir.graph import Arg, Node, Ref, Value


@node_rewrite
def linears(node: Node, graph: Lookup) -> Rewritten | None:
    """``addmm(b, reshape(x, [-1, k]), w)`` -> ``linear_kn(x, w, b)``; likewise ``mm`` and ``linear`` of a flattened operand."""
    values, producers = graph.values, graph.producers
    if node.op == "aten.addmm" and not node.kwargs:
        bias, x, weight = node.args
    elif node.op == "aten.mm":
        (x, weight), bias = node.args, None
    elif node.op == "aten.linear":
        x, weight, bias = (*node.args, None)[:3]
    else:
        return None
    assert isinstance(x, Ref)
    source = x.name
    producer = producers.get(source)
    if producer is not None and producer.op == "aten.reshape" and len(values[source].shape) == 2:
        before = producer.operands()[0]
        if values[before].shape[-1:] == values[source].shape[-1:] and len(values[before].shape) > 2:
            source = before
    op = "aten.linear" if node.op == "aten.linear" else "ap.linear_kn"
    if source == x.name and op == node.op:
        return None
    if op == "ap.linear_kn" and isinstance(weight, Ref) and len(values[weight.name].shape) != 2:
        return None
    if bias is not None and isinstance(bias, Ref) and len(values[bias.name].shape) != 1:
        return None
    result = node.outputs[0]
    shape = (*values[source].shape[:-1], result.shape[-1])
    args: tuple[Arg, ...] = (Ref(source), weight) if bias is None else (Ref(source), weight, bias)
    if source == x.name:
        return replace(node, op=op, args=args, kwargs=())
    wide = Value(f"{result.name}_wide", shape, result.dtype, result.differentiable)
    values[wide.name] = wide
    whole = replace(node, op=op, args=args, kwargs=(), outputs=(wide,))
    return (whole, replace(node, op="aten.reshape", args=(Ref(wide.name), size_args(result.shape)), kwargs=())), {}
