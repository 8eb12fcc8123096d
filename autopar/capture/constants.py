"""Constants: values that depend on no input, parameter or buffer, evaluated on real tensors; and tensors that are neither, whose
values become part of the graph, as ``ap.constant(shape, values)``. Few numbers are written out; more are packed (zlib, base64) in
pieces of text, since a plan's strings are short."""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.capture.flat import FlatGraph
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol
from autopar.operations.factories import ARANGE, CONSTANT, FULL, SCALAR
from autopar.runtime.ops.functions import unpacked


def evaluate_constant(flat: FlatGraph, name: str, batch: int, producers: Mapping[str, Node] | None = None) -> Tensor | None:
    """The value at this batch size, a CPU tensor; None where it depends on data. `producers` are those of `flat`, where the
    caller has them."""
    order = constant_nodes(flat.producers() if producers is None else producers, name)
    if order is None:
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


def constant_nodes(producers: Mapping[str, Node], name: str) -> list[Node] | None:
    """The nodes that compute a value, each after what it reads; None where it depends on data."""
    order: dict[str, Node] = {}
    waiting = [(name, False)]
    while waiting:
        value, ready = waiting.pop()
        node = producers.get(value)
        if node is None:
            return None
        if ready:
            order[node.name] = node
        elif node.name not in order:
            waiting.append((value, True))
            waiting += [(operand, False) for operand in node.operands()]
    return list(order.values())


def resolve(op: str) -> Any:
    """The torch operator of ``aten.add.Tensor``."""
    if op == CONSTANT:
        return unpacked
    namespace, packet, *overload = op.split(".")
    found = getattr(getattr(torch.ops, namespace), packet)
    return getattr(found, overload[0] if overload else "default")


def concrete(arg: Arg, tensors: dict[str, Any], batch: int) -> Any:
    """An argument as torch takes it."""
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, Symbol):
        return arg.at(batch)
    if isinstance(arg, DType):
        return getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [concrete(item, tensors, batch) for item in arg]
    return arg


def kwargs_of(node: Node, tensors: dict[str, Any], batch: int) -> dict[str, Any]:
    return {key: concrete(arg, tensors, batch) for key, arg in node.kwargs}


WRITTEN_OUT = 32
"""The most numbers that stand in the program as they are."""
LARGEST = 1 << 20
"""Bytes of a packed constant; a larger one is the model's state, and must be a buffer."""
_PIECE = 480


def constant_node(tensor: torch.Tensor) -> tuple[str, tuple[Arg, ...]] | None:
    """The operation that makes this tensor, with its arguments; None where it is too large."""
    tensor = tensor.detach().cpu()
    if not tensor.dim():
        return SCALAR, (tensor.item(),)
    flat = tensor.flatten()
    if not flat.numel() or bool((flat == flat[0]).all()):
        return FULL, (tuple(tensor.shape), flat[0].item() if flat.numel() else 0)
    integers = tensor.dtype in (torch.int32, torch.int64)
    if integers and tensor.dim() == 1 and len(set(tensor.diff().tolist())) == 1:
        step = int(tensor[1] - tensor[0])
        return ARANGE, (int(tensor[0]), int(tensor[-1]) + step, step)
    shape: tuple[Arg, ...] = tuple(tensor.shape)
    if flat.numel() <= WRITTEN_OUT and (not tensor.is_floating_point() or bool(flat.isfinite().all())):
        return CONSTANT, (shape, tuple(flat.tolist()))
    packed = zlib.compress(flat.contiguous().view(torch.uint8).numpy().tobytes(), 9)
    if len(packed) > LARGEST:
        return None
    text = b64encode(packed).decode()
    pieces = tuple(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
    return CONSTANT, (shape, (str(tensor.dtype).removeprefix("torch."), *pieces))
