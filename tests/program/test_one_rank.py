"""A program for one rank is the graph: no processes, no collectives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.models.handwritten_blocks import gpt2_graph
from support.models.mixed_graph import mixed_graph
from support.oracles.expected_collectives import collectives
from support.oracles.interpret_graph import buffers_after, loss_and_gradients, make_batch, make_state
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.ir.graph import Graph
from autopar.passes.lower import lower
from autopar.program.build import render
from autopar.program.load import load_program
from autopar.runtime.device.axis import AxisHandle


@pytest.mark.parametrize("graph", [gpt2_graph(2, 16, 4, 32, 8, 8, dtype="float64"), mixed_graph()], ids=["gpt2", "mixed"])
@pytest.mark.parametrize("batch_size", [8, 3])
def test_one_rank_computes_the_graph(graph: Graph, batch_size: int) -> None:
    lowered = lower(graph, drawn_candidate(graph, mesh_of(dp=1, tp=1), 1, wild=0.5))
    assert not collectives(lowered)
    axes = {name: AxisHandle(name) for name in ("dp", "tp", "tp2")}
    mesh = SimpleNamespace(device=torch.device("cpu"), axes={"dp": 1, "tp": 1}, model_axes=(axes["tp"],), axis=axes.get, **axes)
    mesh.group_state = lambda neighbours: None
    program = load_program(render(lowered)).Program(mesh)
    state, batch = make_state(graph), make_batch(graph, 32)
    batch = {name: tensor[:batch_size] for name, tensor in batch.items()}
    leaves: dict[str, torch.Tensor] = {}
    for block in program.blocks():
        for spec in block.specs:
            name = block.original_names[spec.path]
            if name not in leaves:
                leaves[name] = state[name].clone() if spec.buffer else torch.nn.Parameter(state[name].clone(), spec.trainable)
            setattr(block, spec.attribute, leaves[name])
    loss = program(**batch)
    loss.backward()
    small = Graph(graph.name, graph.inputs, graph.blocks, graph.calls, graph.loss, batch_size, graph.fingerprint)
    expected, gradients = loss_and_gradients(small, state, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(leaves[name].grad, gradient, rtol=1e-9, atol=1e-12)
    for name, buffer in buffers_after(small, state, batch).items():
        torch.testing.assert_close(leaves[name], buffer)
