"""Lengths of documents: what can be written, and what they make of the price of attention within documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.handwritten_blocks import Builder

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.workload import DocumentLengths
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.errors import ClusterError
from autopar.ir.graph import Block
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Replicate, Shard
from autopar.ir.plan import NodePlan
from autopar.operations.attention import document_ring_collectives, with_packed_tokens

LENGTHS = (100, 100, 200)
TOKENS = (100 * 100 * 2 + 200 * 200) / 400


@pytest.mark.parametrize("given", [list(LENGTHS), {"100": 2, "200": 1}, {100: 2, 200: 1}])
def test_tokens_that_a_token_is_among(given: Any, tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps(given))
    assert DocumentLengths.parse(given).tokens == DocumentLengths.parse(str(tmp_path / "lengths.json")).tokens == TOKENS


def test_one_length() -> None:
    assert DocumentLengths.parse("512") == DocumentLengths.parse(512) == DocumentLengths(512.0)


@pytest.mark.parametrize("given", ["many", "", [], {}, [0], [-3, 5], {"a": 1}, {"5": -1}, [[1]], "nan", "1e400", "missing.json"])
def test_nonsense_is_one_line(given: Any) -> None:
    with pytest.raises(ClusterError, match=r"^[^\n]+$"):
        DocumentLengths.parse(given)


def test_a_cluster_keeps_it() -> None:
    cluster = replace(Cluster.parse("dgx-h100:1"), document_lengths=DocumentLengths(128.0))
    assert Cluster.from_dict(cluster.to_dict()).document_lengths == cluster.document_lengths


def packed_attention(*, causal: bool = True, window: int | None = None) -> Block:
    b = Builder("Layer")
    q, k, v = (b.input(name, ("B", 8, 1024, 64)) for name in "qkv")
    ids, positions = (b.input(name, ("B", 1024), dtype="int64") for name in ("ids", "positions"))
    more = (positions, positions) if causal else ()
    kwargs = {} if window is None else {"window": (window, 0)}
    made = b.op("ap.attention_documents", q, k, v, ids, ids, *more, shape=("B", 8, 1024, 64), name="attention", **kwargs)
    return b.block(made)


def test_the_work_of_attention_grows_with_the_lengths() -> None:
    """One document a sequence is causal attention; of documents of a quarter, a quarter of it; every query sees half of its
    document on average where later keys are hidden."""
    cluster, mesh = Cluster.parse("dgx-h100:1"), Mesh((Axis("dp", 8),))

    def flops(tokens: float, causal: bool = True, window: int | None = None) -> float:
        told = replace(cluster, document_lengths=DocumentLengths(tokens))
        return BlockCosts(packed_attention(causal=causal, window=window), mesh, 8, told).profile("attention").forward_flops

    whole = 2 * 8 * 8 * 1024 * 1024 * (64 + 64)
    assert flops(0) == whole / 2 and flops(256) == whole / 8 and flops(5000) == whole / 2
    seen = sum(min(place, 31) + 1 for place in range(256)) / 256
    assert flops(256, window=31) == pytest.approx(whole * seen / 1024)
    assert flops(0, causal=False) == whole and flops(256, causal=False) == whole / 4


@pytest.mark.parametrize("function", ["", "ap.attention_documents_ring"])
@pytest.mark.parametrize("tokens", [1024, 512, 256, 128, 32])
def test_the_busiest_shard_of_a_sequence(function: str, tokens: int) -> None:
    """Of documents of one length, counted: queries see the keys of their document before them. The ring evens them out."""
    mesh, block = Mesh((Axis("dp", 1), Axis("cp", 8))), packed_attention()
    cluster = replace(Cluster.parse("dgx-h100:1"), document_lengths=DocumentLengths(tokens))
    keys, numbers = (Shard(2), Shard(1)) if function else (Replicate(), Replicate())
    operands = (Shard(2), keys, keys, Shard(1), numbers, Shard(1), numbers)
    placed = tuple((Replicate(), each) for each in operands)

    def seconds(label: str) -> float:
        plan = NodePlan("attention", placed, ((Replicate(), Shard(2)),), ("", label), function)
        return BlockCosts(block, mesh, 8, cluster).node(plan).forward_seconds

    work = [sum(place % tokens + 0.5 for place in range(128 * rank, 128 * rank + 128)) for rank in range(8)]
    busiest = 1.0 if function else max(work) / (sum(work) / 8)
    assert seconds("s t" if function else "s") / seconds("even") == pytest.approx(busiest)


def test_short_documents_need_the_keys_of_neighbours_alone() -> None:
    (node,) = packed_attention().nodes
    values = packed_attention().values()
    shapes = tuple(values[name].shape for name in node.operands())
    for tokens, group in ((0, 0), (512, 0), (128, 2)):
        moved = [each for each in document_ring_collectives(with_packed_tokens(node, tokens), shapes) if each.overlapped]
        assert [each.group for each in moved] == [group] * 3 and {each.shape for each in moved} == {("B", 8, 1024, 128)}
