"""Programs of drawn candidates, run by real processes, give the loss, gradients and buffers of the graph on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_steps
from support.models.handwritten_blocks import gpt2_graph
from support.models.mixed_graph import mixed_graph
from support.oracles.interpret_graph import buffers_after, loss_and_gradients, make_batch, make_state
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.program.build import program_text

MESHES = {"dp": {"dp": 4}, "tp": {"dp": 1, "tp": 4}, "both": {"dp": 2, "tp": 2}, "two": {"dp": 1, "tp": 2, "tp2": 2}}
CLASSES = 32
GRAPHS = {"gpt2": lambda: gpt2_graph(2, 16, 4, CLASSES, 8, 8, dtype="float64"), "mixed": mixed_graph}


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, text: str) -> None:
    assert found.keys() == expected.keys(), text
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        assert error < tolerance, f"{name}: {float(error)}\n{text}"


def compare(found: Any, graph: Graph, state: Any, batch: Any, tolerance: float, text: str) -> None:
    loss, gradients = loss_and_gradients(graph, state, batch)
    assert found[0] == pytest.approx(loss, rel=tolerance), text
    near(found[1], gradients, tolerance, text)
    near(found[2], buffers_after(graph, state, batch), tolerance, text)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", GRAPHS)
def test_drawn_candidates_train_like_one_process(model: str, mesh: str, ranks: RankPool) -> None:
    graph = GRAPHS[model]()
    state, batch = make_state(graph), make_batch(graph, CLASSES)
    texts = [
        program_text(graph, drawn_candidate(graph, mesh_of(**MESHES[mesh]), seed, zero=seed % 4, wild=0.2 * seed))
        for seed in range(4)
    ]
    results = ranks.run(train_steps, [(text, state, batch) for text in texts])
    for found in (results[0], results[3]):
        for one, text in zip(found, texts, strict=True):
            compare(one, graph, state, batch, 1e-9, text)


@pytest.mark.parametrize("zero", [0, 3])
def test_recomputed_blocks_train_like_one_process(zero: int, ranks: RankPool) -> None:
    graph = GRAPHS["gpt2"]()
    state, batch = make_state(graph), make_batch(graph, CLASSES)
    candidate = drawn_candidate(graph, mesh_of(dp=2, tp=2), 2, zero=zero, wild=0.3)
    plans = tuple(replace(plan, recompute=plan.block == "GPT2Block") for plan in candidate.blocks)
    text = program_text(graph, replace(candidate, blocks=plans))
    assert text.count("recompute = True") == 1
    (found,) = ranks.run(train_steps, [(text, state, batch)])[1]
    compare(found, graph, state, batch, 1e-9, text)


@pytest.mark.slow
def test_blocks_compile(ranks: RankPool) -> None:
    graph = GRAPHS["gpt2"]()
    state, batch = make_state(graph), make_batch(graph, CLASSES)
    text = program_text(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 1, zero=3, wild=0.1))
    (found,) = ranks.run(train_steps, [(text, state, batch, "aot_eager")], timeout=120)[0]
    compare(found, graph, state, batch, 1e-9, text)


@pytest.mark.parametrize("zero", [0, 3])
def test_mixed_precision_keeps_gradients_in_the_master_dtype(zero: int, ranks: RankPool) -> None:
    graph = gpt2_graph(2, 16, 4, CLASSES, 8, 8, dtype="bfloat16")
    state = {name: tensor.float() for name, tensor in make_state(graph).items()}
    batch = make_batch(graph, CLASSES)
    precision = Precision("bfloat16", "float32")
    text = program_text(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 1, zero=zero, wild=0.0, precision=precision))
    (found,) = ranks.run(train_steps, [(text, state, batch)])[0]
    assert all(gradient.dtype is torch.float32 for gradient in found[1].values())
    full = gpt2_graph(2, 16, 4, CLASSES, 8, 8, dtype="float32")
    loss, gradients = loss_and_gradients(full, state, batch)
    assert found[0] == pytest.approx(loss, rel=0.02)
    for name, expected in gradients.items():
        assert torch.cosine_similarity(found[1][name].flatten(), expected.flatten(), 0) > 0.98, name
