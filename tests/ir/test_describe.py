"""Plans get the names that people call them by, from placements alone."""

from __future__ import annotations

from dataclasses import replace

from support.models.handwritten_blocks import gpt2_graph
from support.plans.handwritten_candidates import GPT2_TENSOR_PARALLEL, candidate

from autopar.ir.describe import describe, parallelism
from autopar.ir.placement import Shard


def test_names() -> None:
    graph = gpt2_graph(layers=2, hidden=1024, heads=16)
    plain = candidate(graph, 3, dp=8)
    found = parallelism(graph, plain)
    assert (found.dp, found.tp, found.cp, found.zero) == (8, 1, 1, 3) and describe(graph, plain) == "dp=8 (ZeRO-3)"
    mixed = candidate(graph, 1, GPT2_TENSOR_PARALLEL, dp=2, tp=4)
    found = parallelism(graph, mixed)
    assert (found.dp, found.tp, found.zero) == (2, 4, 1)
    for text in ("column- and row-parallel linears", "attention heads", "vocabulary-parallel loss"):
        assert text in describe(graph, mixed)


def test_sharded_sequence_and_recomputation_are_named() -> None:
    graph = gpt2_graph(layers=2, hidden=1024, heads=16)
    plan = candidate(graph, 0, GPT2_TENSOR_PARALLEL, dp=2, tp=4)
    at = (Shard(0), Shard(1))
    sharded = replace(plan.block("GPT2Block"), inputs=(at,), outputs=(at,), recompute=True)
    changed = replace(plan, blocks=tuple(sharded if block.block == "GPT2Block" else block for block in plan.blocks))
    assert "sequence-sharded activations" in describe(graph, changed)
    assert "GPT2Block recomputed" in describe(graph, changed)
