"""Rewrites losses with a mean reduction: a sum, divided by the number of elements, which depends on the batch size only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.capture.flat import FlatGraph, rewrite_nodes
from autopar.capture.normalize.losses import average
from autopar.ir.graph import Arg, Node, Value

_REDUCTION = {
    "aten.l1_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 2,
    "aten.kl_div": 2,
    "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}
"""Where the argument ``reduction`` stands (1 mean, 2 sum)."""
_DEFAULTS: tuple[Arg, ...] = (None, None, None, None)


def mean_losses(flat: FlatGraph) -> FlatGraph:
    """``smooth_l1_loss(a, b)`` becomes ``smooth_l1_loss(a, b, 2)`` divided by the number of elements."""
    values = flat.values()

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        at = _REDUCTION.get(node.op)
        if at is None:
            return None
        given = dict(node.kwargs)
        reduction = node.args[at] if len(node.args) > at else given.pop("reduction", 1)
        if reduction != 1:
            return None
        head = (*node.args[:at], *_DEFAULTS)[:at] if len(node.args) < at else node.args[:at]
        result = node.outputs[0]
        total = Value(f"{result.name}_sum", result.shape, result.dtype, result.differentiable)
        kwargs = tuple((key, arg) for key, arg in given.items() if key != "reduction")
        summed = replace(node, args=(*head, 2, *node.args[at + 1 :]), kwargs=kwargs, outputs=(total,))
        return (summed, average(node, total, list(values[node.operands()[0]].shape))), {}

    return rewrite_nodes(flat, step)


def broadcasts(flat: FlatGraph) -> FlatGraph:
    """``broadcast_tensors(a, b)`` vanishes for operands that have the common shape already."""
    values = flat.values()

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != "aten.broadcast_tensors":
            return None
        operands = node.operands()
        if any(values[name].shape != value.shape for name, value in zip(operands, node.outputs, strict=True)):
            return None
        return (), {value.name: name for name, value in zip(operands, node.outputs, strict=True)}

    return rewrite_nodes(flat, step)
