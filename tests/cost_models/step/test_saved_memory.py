"""Saved activations against published formulas and eager torch, each tensor once; memory of evaluations."""

from __future__ import annotations

import pytest
import torch
from support.models.handwritten_blocks import Builder, gpt2_block, gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.handwritten_candidates import GPT2_TENSOR_PARALLEL, block_plan, candidate
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import block_memory
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan import Precision


def saved_bytes(block_tp: int, seq: int = 1024, hidden: int = 1024, heads: int = 16, batch: int = 4) -> float:
    block = gpt2_block(hidden, heads, seq, dtype="bfloat16")
    mesh = mesh_of(dp=1, tp=block_tp)
    plan = block_plan(block, mesh, 0, GPT2_TENSOR_PARALLEL["GPT2Block"] if block_tp > 1 else {}, True, batch)
    memory = block_memory(BlockCosts(block, mesh, batch, Cluster.parse(f"local:{block_tp}")), plan)
    return memory.internal_saved_bytes + sum(size for _, size in memory.boundary_saved_bytes)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_transformer_layer(t: int) -> None:
    """Korthikanti et al., arXiv 2205.05198, Table 2, tensor parallel: s b h (10 + 24/t) without dropout masks (2) and without the
    score matrix: s b h (8 + 24/t), and flash attention's float32 log-sum-exp 4 a s b / t, and mean and deviation of two norms.
    (4 norms' inputs, 2 + 2 outputs for qkv and the first linear; q, k, v, attention's result, GELU's input and output sharded.)
    """
    s, b, h, a = 1024, 4, 1024, 16
    assert saved_bytes(t) == pytest.approx(s * b * h * (8 + 24 / t) + 4 * a * s * b / t + 2 * 8 * s * b)


def test_a_tensor_with_several_consumers_counts_once() -> None:
    b = Builder("Shared")
    x = b.parameter("x", (64, 64))
    y = b.op("aten.tanh", x, shape=(64, 64), name="y")
    z = b.op("aten.reshape", y, (4096,), shape=(4096,), name="z")
    left = b.op("aten.pow.Tensor_Scalar", z, 2, shape=(4096,), name="left")
    right = b.op("aten.silu", y, shape=(64, 64), name="right")
    block = b.block(left, right)  # type: ignore[arg-type]
    mesh = mesh_of(dp=1)
    plan = block_plan(block, mesh, 0, {}, True, 1)
    memory = block_memory(BlockCosts(block, mesh, 1, Cluster.parse("local:1")), plan)
    assert memory.internal_saved_bytes == 64 * 64 * 4 and memory.boundary_saved_bytes == ()


def test_saved_bytes_are_those_of_eager() -> None:
    """A two-layer perceptron, by hooks on real tensors (parameters left out)."""
    b = Builder("MLP")
    x = b.input("x", ("B", 32))
    one = b.op("aten.linear", x, b.parameter("a", (64, 32)), b.parameter("ab", (64,)), shape=("B", 64), name="one")
    two = b.op("aten.gelu", one, shape=("B", 64), name="two")
    block = b.block(b.op("aten.linear", two, b.parameter("c", (32, 64)), shape=("B", 32), name="out"))  # type: ignore[arg-type]
    mesh = mesh_of(dp=1)
    memory = block_memory(BlockCosts(block, mesh, 16, Cluster.parse("local:1")), block_plan(block, mesh, 0, {}, True, 16))
    storages = {}
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: storages.update({t.data_ptr(): t}) or t, lambda t: t):
        model(torch.rand(16, 32, requires_grad=True))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    real = sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)
    assert memory.internal_saved_bytes + sum(size for _, size in memory.boundary_saved_bytes) == real


def test_stages_shrink_memory() -> None:
    graph = gpt2_graph(layers=4, dtype="bfloat16", batch=32)
    cluster = Cluster.parse("dgx-h100:1")
    peaks = [
        evaluate(graph, candidate(graph, zero, precision=Precision("bfloat16", "float32"), dp=8), cluster).peak_memory_bytes
        for zero in (0, 1, 3)
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_memory_falls_with_the_batch_and_the_table_adds_up() -> None:
    graph, cluster = gpt2_graph(layers=2), Cluster.parse("dgx-h100:1")
    small, large = (evaluate(graph, candidate(graph, 0, batch=batch, dp=8), cluster) for batch in (8, 64))
    assert small.peak_memory_bytes < large.peak_memory_bytes == sum(dict(large.memory).values())


@pytest.mark.parametrize("seed", range(3))
def test_any_candidate_has_a_price(seed: int) -> None:
    graph, cluster = gpt2_graph(layers=2, hidden=64, heads=4, vocabulary=256, seq=16), Cluster.parse("dgx-h100:1")
    plan = drawn_candidate(graph, mesh_of(dp=2, tp=4), seed, zero=seed)
    evaluation = evaluate(graph, plan, cluster)
    assert evaluation.step_seconds > 0 and evaluation.fits
