"""Rewrites losses as sums over the batch and a count, so that shards of the batch give the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from autopar.capture.flat import FlatGraph, node_like, rewrite_nodes
from autopar.ir.dims import Dim, as_dim, as_sympy, has_batch
from autopar.ir.graph import Arg, Node, Ref, Symbol, Value

_MEAN, _SUM = 1, 2


def cross_entropy(flat: FlatGraph) -> FlatGraph:
    """``cross_entropy_loss`` becomes ``cross_entropy_sum``, divided by ``count_valid`` for the mean, without flattening
    before."""
    values, producers = flat.values(), flat.producers()

    def unflatten(logits: str, target: str) -> tuple[str, str]:
        one, two = producers.get(logits), producers.get(target)
        if one is None or one.op != "aten.reshape" or len(values[logits].shape) != 2:
            return logits, target
        wide = one.operands()[0]
        if values[wide].shape[-1:] != values[logits].shape[-1:]:
            return logits, target
        for candidate in (two.operands()[0] if two is not None and two.op == "aten.reshape" else "", target):
            if candidate and values[candidate].shape == values[wide].shape[:-1]:
                return wide, candidate
        return logits, target

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != "aten.cross_entropy_loss":
            return None
        given = (*node.args, *(None, _MEAN, -100, 0.0)[len(node.args) - 2 :])
        options = dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), given[2:], strict=True)) | dict(
            node.kwargs
        )
        logits, target = node.operands()[:2]
        new: list[Node] = []
        if len(values[logits].shape) > 2:
            order = (0, *range(2, len(values[logits].shape)), 1)
            shape = tuple(values[logits].shape[dim] for dim in order)
            last = node_like(node, "aten.permute", (Ref(logits), order), f"{node.name}_last", shape)
            new.append(last)
            values[last.name] = last.outputs[0]
            logits = last.name
        logits, target = unflatten(logits, target)
        ignore = options["ignore_index"]
        args: tuple[Arg, ...] = (Ref(logits), Ref(target), ignore, options["label_smoothing"])
        if options["reduction"] == _SUM:
            new.append(replace(node, op="ap.cross_entropy_sum", args=args, kwargs=()))
            return tuple(new), {}
        total = node_like(node, "ap.cross_entropy_sum", args, f"{node.name}_sum", ())
        count = node_like(node, "ap.count_valid", (Ref(target), ignore), f"{node.name}_count", (), flows=False)
        if values[logits].dtype != "float32":
            count = node_like(
                node, "ap.count_valid", (Ref(target), ignore), f"{node.name}_count", (), dtype=values[logits].dtype, flows=False
            )
        quotient = (Ref(total.name), Ref(count.name))
        division = replace(node, op="aten.div.Tensor", args=quotient, kwargs=())
        return (*new, total, count, division), {}

    return rewrite_nodes(flat, step)


def full_means(flat: FlatGraph) -> FlatGraph:
    """A mean over the batch becomes a sum and a division by the number of elements, which depends on the batch size only."""
    values = flat.values()

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op not in ("aten.mean", "aten.mean.dim"):
            return None
        operand = values[node.operands()[0]]
        rank = len(operand.shape)
        if not rank and operand.dtype == node.outputs[0].dtype:
            return (), {node.outputs[0].name: operand.name}
        dims = node.args[1] if node.op == "aten.mean.dim" and len(node.args) > 1 and node.args[1] is not None else None
        reduced = [int(dim) % rank for dim in dims] if isinstance(dims, tuple) and dims else list(range(rank))  # type: ignore[arg-type]
        if node.op == "aten.mean.dim" and not any(has_batch(operand.shape[dim]) for dim in reduced):
            return None
        result = node.outputs[0]
        total = Value(f"{result.name}_sum", result.shape, result.dtype, result.differentiable)
        keep = len(node.args) > 2 and bool(node.args[2])
        args: tuple[Arg, ...] = (node.args[0],) if result.shape == () else (node.args[0], tuple(reduced), keep)
        op = "aten.sum" if result.shape == () else "aten.sum.dim_IntList"
        summed = Node(op=op, args=args, kwargs=(), outputs=(total,), module=node.module, source=node.source, no_grad=node.no_grad)
        return (summed, average(node, total, [operand.shape[dim] for dim in reduced])), {}

    return rewrite_nodes(flat, step)


def average(node: Node, total: Value, shape: list[Dim]) -> Node:
    """Return the result of `node`, as `total` over the number of elements of `shape`."""
    size = count(shape)
    number: Arg = Symbol(size) if isinstance(size, str) else size
    return replace(node, op="aten.div.Tensor", args=(Ref(total.name), number), kwargs=())


def count(shape: list[Dim]) -> Dim:
    """The number of elements, in B where it depends on it."""
    return as_dim(sympy.prod([as_sympy(dim) for dim in shape]))
