"""What the solver finds on a tensor axis without being told, beside Megatron's plan written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import llama_graph
from support.oracles.plan_collectives import MEGATRON_LLAMA, collectives_of_call
from support.plans.handwritten_candidates import GPT2_TENSOR_PARALLEL, candidate

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.graph import Graph
from autopar.ir.placement import Shard
from autopar.ir.plan import Precision
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

BF16 = Precision("bfloat16", "float32")
CLUSTER = Cluster.parse("dgx-h100:1")


def gpt2() -> Graph:
    return gpt2_graph(layers=4, hidden=1024, heads=16, batch=32, dtype="bfloat16")


def llama() -> Graph:
    return llama_graph(layers=4, batch=8)


CASES = {
    "gpt2": (gpt2, "GPT2Block", GPT2_TENSOR_PARALLEL),
    "llama": (llama, "LlamaDecoderLayer", {"LlamaDecoderLayer": {"tp": MEGATRON_LLAMA}}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", [dict(dp=1, tp=8), dict(dp=2, tp=4)])
def test_never_above_megatron(name: str, axes: Mapping[str, int]) -> None:
    make, _, wishes = CASES[name]
    graph = make()
    by_hand = candidate(graph, 0, wishes, BF16, **axes)
    megatron = evaluate(graph, by_hand, CLUSTER)
    result = search(graph, CLUSTER, SearchOptions(precision=BF16, force={**axes, "zero": 0}))
    assert result.warnings == ()
    assert result.evaluation.step_seconds <= megatron.step_seconds * (1 + 1e-9)
    assert dict(result.evaluation.redundant_share)["tp"] <= 0.02


def few_tokens_gpt2() -> Graph:
    return gpt2_graph(layers=4, hidden=4096, heads=32, batch=1, dtype="bfloat16")


def few_tokens_llama() -> Graph:
    return llama_graph(layers=4, batch=1, seq=1024)


CASES_FEW_TOKENS = {"gpt2": few_tokens_gpt2, "llama": few_tokens_llama}
"""Weights outweigh activations: cutting the sequence inside the block, which would gather weights' gradients, does not pay."""


def residual(graph: Graph, block: str) -> list[str]:
    """The values of the residual stream."""
    return ["hidden", "out", *(n.name for n in graph.block(block).nodes if n.op == "aten.add.Tensor" and len(n.operands()) == 2)]


@pytest.mark.parametrize("name", CASES)
def test_two_collectives_each_way_with_a_whole_residual_stream(name: str) -> None:
    _, block, _ = CASES[name]
    graph = CASES_FEW_TOKENS[name]()
    stream = [v for v in residual(graph, block) if graph.block(block).values()[v].shape == graph.block(block).inputs[0].shape]
    if name == "llama":  # the sum inside a rotation is no residual
        stream = [value for value in stream if value in ("hidden", "out") or _adds_projection(graph, block, value)]
    result = search(graph, CLUSTER, SearchOptions(precision=BF16, force={"tp": 8}, pins=dict.fromkeys(stream, {"tp": "I"})))
    forward, backward = collectives_of_call(graph, result.candidate, block, 1)
    assert forward == Counter(all_reduce=2)
    assert backward == Counter(all_reduce=2)


def _adds_projection(graph: Graph, block: str, value: str) -> bool:
    node = next(node for node in graph.block(block).nodes if node.name == value)
    return any(name.endswith("_proj") for name in node.operands())


@pytest.mark.parametrize("name", CASES)
def test_unpinned_the_stream_is_sharded(name: str) -> None:
    """Gather and reduce-scatter pairs, or all-to-all where that is cheaper: nothing is all-reduced."""
    make, block, _ = CASES[name]
    graph = make()
    result = search(graph, CLUSTER, SearchOptions(precision=BF16, force={"tp": 8}))
    forward, backward = collectives_of_call(graph, result.candidate, block, 1)
    assert forward["all_reduce"] == backward["all_reduce"] == 0
    assert forward["reduce_scatter"] + forward["all_to_all"] >= 1
    plan = result.candidate.block(block)
    assert isinstance(plan.inputs[0][1], Shard) and isinstance(plan.outputs[0][1], Shard)
    factors = {each.node: each.factors[1] for each in plan.nodes}
    assert not any(
        factor == "redundant" for node, factor in factors.items() if node.endswith(("_proj", "c_attn", "c_fc", "c_proj"))
    )


def test_a_two_dimensional_mesh_is_no_worse_than_its_one_axis() -> None:
    """Cutting 8 as 4 x 2 on one node offers at least the plans of 8, up to latencies."""
    graph = llama()
    one, two = (
        search(graph, CLUSTER, SearchOptions(precision=BF16, force=force)).evaluation.step_seconds
        for force in ({"tp": 8}, {"tp": 4, "tp2": 2})
    )
    assert two <= one * 1.1
