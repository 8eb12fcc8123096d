"""torch's own samples of an operation (OpInfo), through capture, and every strategy of every captured node on shards."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry
from support.oracles.simulate_ranks import assert_sharded_equals_whole, run_node

REGISTRY = default_registry()
BATCH = [torch.ones(7)] * 8
"""Inputs that nothing reads, so that no dimension of a sample seems to be the batch."""


def core_operations() -> list[Any]:
    """The OpInfos of operations with a variant in ATen's core opset."""
    if (
        "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
    ):  # torch's tests want it, its samples do not
        stub = ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    def is_core(name: str) -> bool:
        packet = getattr(torch.ops.aten, name, None)
        return packet is not None and any(torch.Tag.core in getattr(packet, each).tags for each in packet.overloads())

    return [info for info in op_db if is_core(info.aten_name or info.name.replace(".", "_")) and torch.float64 in info.dtypes]


class OneOperation(nn.Module):
    """Calls an operation with a sample's arguments, whose tensors are inputs; the loss weighs its results."""

    def __init__(self, op: Any, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.op, self.leaves, self.spec = op, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, tensors: list[Tensor], batch: list[Tensor] | None = None) -> Tensor:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        found, _ = tree_flatten(self.op(*args, **kwargs))
        total = torch.zeros((), dtype=torch.float64)
        for number, each in enumerate(found):
            if isinstance(each, Tensor):
                real = torch.view_as_real(each) if each.is_complex() else each
                total = total + (real.double() * (0.5 + number)).sum()
        return total


def samples(info: Any, most: int) -> Iterator[tuple[OneOperation, list[Tensor]]]:
    """The first samples with tensors whose result one process can compute and has no undefined values."""
    given = 0
    for sample in info.sample_inputs("cpu", torch.float64, requires_grad=False):
        leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or any(not tensor.numel() or tensor.is_complex() for tensor in tensors):
            continue
        model = OneOperation(info.op, leaves, spec)
        try:
            model(tensors)
        except Exception:  # noqa: BLE001  a sample that torch refuses itself
            continue
        yield model, tensors
        given += 1
        if given == most:
            return


def outcome(model: OneOperation, tensors: list[Tensor], random: bool) -> str:
    """``equal``; or what is wrong, in a line."""
    try:
        graph = capture(model, (), {"tensors": tensors, "batch": BATCH})
    except AutoparError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  that is what is looked for
        return f"crashed: {type(error).__name__}: {error}"
    if random:
        return "equal"
    named = {f"tensors_{index}": tensor for index, tensor in enumerate(tensors)}
    try:
        found = _on_shards(graph, named | {f"batch_{index}": tensor for index, tensor in enumerate(BATCH)})
        torch.testing.assert_close(found, model(tensors), rtol=1e-9, atol=1e-9, equal_nan=True)
    except Exception as error:  # noqa: BLE001
        return f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "equal"


def _on_shards(graph: Graph, held: dict[str, Tensor]) -> Tensor:
    """The loss; on the way, every strategy of every node over two ranks is compared with the whole."""
    for call in graph.calls:
        block = graph.block(call.block)
        tensors = {value.name: held[name] for value, name in zip(block.inputs, call.inputs, strict=True)}
        made: Any = {}
        for batch_axis in (True, False):
            for name, each in block_strategies(
                block, 2, batch_axis=batch_axis, batch_is_symbolic=graph.batch_is_symbolic, registry=REGISTRY
            ).items():
                made.setdefault(name, {}).update(dict.fromkeys(each))
        for node in block.nodes:
            for strategy in made[node.name]:
                operands = [(placement,) for placement in strategy.operands]
                results = [(placement,) for placement in strategy.results]
                if all(_divides(tensors[name], place) for name, (place,) in zip(node.operands(), operands, strict=True)):
                    assert_sharded_equals_whole(node, tensors, operands, results, (2,), strategy.function, 0, graph.batch)
            tensors.update((value.name, x) for value, x in zip(node.outputs, run_node(node, tensors, graph.batch), strict=False))
        held.update((name, tensors[inner]) for name, inner in zip(call.outputs, block.outputs, strict=True))
    return held[graph.loss]


def _divides(tensor: Tensor, placement: Any) -> bool:
    dim = getattr(placement, "dim", None)
    return dim is None or tensor.shape[dim] % (2 * placement.parts) == 0
