"""Runs a captured graph on whole tensors, and makes state and batches for it: the process that programs are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from autopar.ir.dims import shape_at
from autopar.ir.graph import Block, Graph
from autopar.program.program_attributes import batch_method
from support.oracles.simulate_ranks import run_node


def make_state(graph: Graph, seed: int = 0) -> dict[str, torch.Tensor]:
    """Full tensors by original name."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, parameter in graph.parameters().items():
        value = parameter.value
        shape = shape_at(value.shape, graph.batch)
        out[name] = torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.3).to(getattr(torch, value.dtype))
    return out


def make_batch(graph: Graph, classes: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Integers below `classes`, labels with some ignored unevenly, floats at random."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for value in graph.inputs:
        shape = shape_at(value.shape, graph.batch)
        if value.dtype.startswith("int"):
            out[value.name] = torch.randint(classes, shape, generator=generator)
            if value.name == "labels":
                out[value.name][0] = -100
                out[value.name].reshape(shape[0], -1)[-1, :2] = -100
        else:
            out[value.name] = torch.randn(shape, generator=generator, dtype=getattr(torch, value.dtype))
    return out


def run_graph(graph: Graph, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss."""
    return _run(graph, state, batch)[0][graph.loss]


def buffers_after(graph: Graph, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every buffer after one forward in training mode."""
    _, after = _run(graph, state, batch)
    return {name: after[name] for name, parameter in graph.parameters().items() if parameter.buffer}


def takes_batch(graph: Graph, batch: int) -> bool:
    """Return what the program of a graph says of a batch: whether it has the operations of this size."""
    names: dict[str, Any] = {"takes_batch": staticmethod(lambda batch: True)}
    exec("\n".join(line.removeprefix("    ") for line in batch_method(graph.interface)), names)
    return names["takes_batch"].__func__(batch)  # type: ignore[no-any-return]


def _run(
    graph: Graph, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All values between blocks, and the state after it."""
    held, state = dict(batch), dict(state)
    for call in graph.calls:
        block = graph.block(call.block)
        tensors = {value.name: held[name] for value, name in zip(block.inputs, call.inputs, strict=True)}
        tensors |= {p.value.name: state[name] for p, name in zip(block.parameters, call.parameters, strict=True)}
        run_nodes(block, tensors, graph.batch)
        held.update((name, tensors[inner]) for name, inner in zip(call.outputs, block.outputs, strict=True))
        inside = {p.value.name: name for p, name in zip(block.parameters, call.parameters, strict=True)}
        state.update((inside[buffer], tensors[value]) for buffer, value in block.updates)
    return held, state


def run_nodes(block: Block, tensors: dict[str, torch.Tensor], batch: int) -> None:
    """Adds the results of all nodes to `tensors`."""
    for node in block.nodes:
        with torch.set_grad_enabled(not node.no_grad):
            results = run_node(node, tensors, batch)
        tensors.update((value.name, result) for value, result in zip(node.outputs, results, strict=True))


def loss_and_gradients(
    graph: Graph, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one process."""
    trainable = {name for name, parameter in graph.parameters().items() if parameter.trainable and not parameter.buffer}
    leaves = {name: tensor.clone().requires_grad_(name in trainable) for name, tensor in state.items()}
    loss = run_graph(graph, leaves, batch)
    loss.backward()
    return loss.item(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def check_captured(
    graph: Graph, model: nn.Module, batch: Mapping[str, torch.Tensor], *, loss_rtol: float = 1e-12, rtol: float = 1e-9,
    atol: float = 1e-12, eager: AbstractContextManager[object] | None = None,
) -> None:  # fmt: skip
    """The graph gives the loss and the gradients of the model, which runs under `eager`."""
    state = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    loss, gradients = loss_and_gradients(graph, state, batch)
    with eager or nullcontext():
        expected = model(**batch)
        expected.backward()
    assert loss == pytest.approx(expected.item(), rel=loss_rtol)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.get(name), parameter.grad, rtol=rtol, atol=atol, msg=name)
