"""Runs the part of a flat graph that no input, parameter or buffer decides, on real tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.capture.flat import Flat
from autopar.ir.dims import value as size
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol


def evaluate_constant(flat: Flat, name: str, batch: int) -> Tensor | None:
    """The value at this batch size, or None where it depends on data. Tensors are on the CPU."""
    producers = flat.producers()
    order: list[Node] = []
    seen: set[str] = set()

    def visit(value: str) -> bool:
        node = producers.get(value)
        if node is None:
            return False
        if node.name in seen:
            return True
        seen.add(node.name)
        if not all(visit(operand) for operand in node.operands()):
            return False
        order.append(node)
        return True

    if not visit(name):
        return None
    last = {operand: node.name for node in order for operand in node.operands()}
    tensors: dict[str, Any] = {}
    for node in order:
        try:
            result = resolve(node.op)(*(concrete(arg, tensors, batch) for arg in node.args), **kwargs_of(node, tensors, batch))
        except (AttributeError, RuntimeError):
            return None
        results = result if isinstance(result, (tuple, list)) else (result,)
        tensors.update((value.name, tensor) for value, tensor in zip(node.outputs, results, strict=False))
        for operand in node.operands():
            if last[operand] == node.name:
                tensors.pop(operand, None)
    found = tensors[name]
    assert isinstance(found, Tensor)
    return found


def resolve(op: str) -> Any:
    """``aten.add.Tensor`` to the overload."""
    namespace, packet, *overload = op.split(".")
    found = getattr(getattr(torch.ops, namespace), packet)
    return getattr(found, overload[0] if overload else "default")


def concrete(arg: Arg, tensors: dict[str, Any], batch: int) -> Any:
    """The argument as torch takes it."""
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, Symbol):
        return size(arg.dim, batch)
    if isinstance(arg, DType):
        return getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [concrete(item, tensors, batch) for item in arg]
    return arg


def kwargs_of(node: Node, tensors: dict[str, Any], batch: int) -> dict[str, Any]:
    return {key: concrete(arg, tensors, batch) for key, arg in node.kwargs}
