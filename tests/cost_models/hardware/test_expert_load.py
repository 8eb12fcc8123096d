"""Uneven routing: what the busiest rank gets, by enumeration, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.handwritten_blocks import Builder
from support.plans.handwritten_candidates import block_plan

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.workload import ExpertLoad
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import block_memory
from autopar.errors import ClusterError
from autopar.ir.graph import Block
from autopar.ir.mesh import Axis, Mesh


@given(st.lists(st.integers(0, 100), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_the_busiest_rank_by_counting(tokens: list[int], ranks: int) -> None:
    load = ExpertLoad(1.25, tuple(map(float, tokens)))
    held = [sum(tokens[rank * 8 // ranks : (rank + 1) * 8 // ranks]) for rank in range(ranks)]
    if not sum(tokens):
        assert load.imbalance(8, ranks) == (1.25 if ranks > 1 else 1.0)
        return
    assert load.imbalance(8, ranks) == pytest.approx(max(held) / (sum(held) / ranks))
    assert load.imbalance(16, 2) == 1.25, "measured of other layers: the factor"


def test_text(tmp_path: Path) -> None:
    assert ExpertLoad.parse("1.5") == ExpertLoad(1.5)
    file = tmp_path / "load.json"
    file.write_text(json.dumps([1, 2, 3, 4]))
    assert ExpertLoad.parse(str(file)).shares == (1.0, 2.0, 3.0, 4.0)
    for wrong in ("0.5", "nan", "many", str(tmp_path / "none.json")):
        with pytest.raises(ClusterError):
            ExpertLoad.parse(wrong)
    file.write_text(json.dumps([1, -2]))
    with pytest.raises(ClusterError, match="not negative"):
        ExpertLoad.parse(str(file))


def test_a_cluster_keeps_it() -> None:
    cluster = replace(Cluster.parse("dgx-h100:1"), expert_load=ExpertLoad(1.0, (1.0, 3.0)))
    assert Cluster.from_dict(cluster.to_dict()).expert_load == cluster.expert_load


def mixture() -> Block:
    b = Builder("Mixture", "bfloat16")
    x = b.input("x", ("B", 512, 256))
    ids = b.input("ids", ("B", 512, 2), dtype="int64")
    weights = b.input("weights", ("B", 512, 2))
    up, down = b.parameter("up", (8, 1024, 256)), b.parameter("down", (8, 256, 512))
    y = b.op(
        "ap.moe_experts", x, ids, weights, up, down, None, None, "silu", "halves", None, shape=("B", 512, 256),
        name="experts",
    )  # fmt: skip
    return b.block(y)  # type: ignore[arg-type]


def test_what_the_busiest_rank_costs() -> None:
    """Dealt out over four ranks, seconds of computing and exchanging and what is kept of copies grow with the load; with experts
    on every rank nothing does."""
    block, mesh = mixture(), Mesh((Axis("dp", 1), Axis("ep", 4)))
    even = replace(Cluster.parse("dgx-h100:1"), size=4)
    uneven = replace(even, expert_load=ExpertLoad(2.0))
    dealt = block_plan(block, mesh, 0, {"ep": {"experts": "e batch0"}}, True, 16)
    (plan,) = dealt.nodes
    assert plan.function == "ap.moe_experts_dispatched"
    one, two = (BlockCosts(block, mesh, 16, cluster) for cluster in (even, uneven))
    for side in ("forward_seconds", "backward_seconds"):
        assert getattr(two.node(plan), side) == pytest.approx(2 * getattr(one.node(plan), side))
    assert sum(two.node(plan).forward_comm_seconds) == pytest.approx(2 * sum(one.node(plan).forward_comm_seconds)) != 0
    assert block_memory(two, dealt).internal_saved_bytes > block_memory(one, dealt).internal_saved_bytes
    inside = block_plan(block, mesh, 0, {"ep": {"experts": "f"}}, True, 16)
    assert two.node(inside.nodes[0]) == one.node(inside.nodes[0])
