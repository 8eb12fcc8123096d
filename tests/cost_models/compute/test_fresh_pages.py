"""Pages of new tensors above the C library's mmap threshold: which tensors pay for them, and what that changes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.compute.operations import profile, seconds_and_flops
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.stage_devices import cluster_for_bounds
from autopar.explain.operation_and_collective_rows import operation_rows, row_formulas
from autopar.ir.graph import Node, Ref, Value
from autopar.ir.placement import Invariant, Placement, Shard
from autopar.ir.plan import NodePlan
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration

LOCAL = Cluster.parse("local:4")
RATE = 2e9
REDUNDANT = Invariant()
FRESH = replace(LOCAL, device=replace(LOCAL.device, fresh_page_bytes_per_second=RATE))
MIB = 2**20


def longer(
    op: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], sizes: tuple[int, ...] = (1,), at: Placement = REDUNDANT
) -> tuple[float, float]:
    """MiB of fresh pages in forward and backward of an operation whose operands need gradients."""
    values = {f"x{index}": Value(f"x{index}", shape, "float32", True) for index, shape in enumerate(shapes)}
    node = Node(op, tuple(map(Ref, values)), (), (Value("y", out, "float32", True),))
    plan = NodePlan("y", ((at,),) * len(shapes), ((at,),), ("batch",))
    known = profile(node, values, 1)
    before, after = (seconds_and_flops(known, plan, sizes, cluster.device) for cluster in (LOCAL, FRESH))
    assert after[2:] == before[2:]
    forward, backward = ((after[side] - before[side]) * RATE / MIB for side in (0, 1))
    return forward, backward


def test_which_tensors_are_new() -> None:
    """Results, and gradients of operands; nothing below 32 MiB on a device, and no views."""
    large, small = (4096, 4096), (1024, 4096)  # 64 and 16 MiB
    assert longer("aten.gelu", [large], large) == pytest.approx((64, 64))
    assert longer("aten.gelu", [small], small) == (0, 0)
    assert longer("aten.gelu", [large], large, (4,), Shard(0)) == (0, 0), "a quarter of it on each device"
    assert longer("aten.linear", [small, large], small) == pytest.approx((0, 64)), "the weight's gradient"
    assert longer("aten.add", [large, large], large) == pytest.approx((64, 0)), "gradients of sums are passed on"
    assert longer("aten.t", [large], large) == (0, 0)


def test_a_machine_that_says_nothing_of_it() -> None:
    for name in ("local:4", "dgx-h100:1"):
        assert Cluster.parse(name).device.fresh_page_bytes_per_second == 0
    assert cluster_for_bounds(LOCAL) is LOCAL and cluster_for_bounds(FRESH).device == LOCAL.device


def test_smaller_micro_batches_may_be_faster() -> None:
    """Of a batch whose logits are fresh pages at once; by the prices for bounds they are not."""
    graph = gpt2_graph(layers=1, hidden=64, heads=2, vocabulary=4096, seq=64, batch=256)  # logits: 64 MiB on each rank
    plan = drawn_candidate(graph, mesh_of(dp=4, tp=1), 0, wild=0.0)

    def steps(cluster: Cluster) -> list[float]:
        return [evaluate(graph, replace(plan, micro_batches=count), cluster).step_seconds for count in (1, 4)]

    plain, fresh, bounds = map(steps, (LOCAL, FRESH, cluster_for_bounds(FRESH)))
    assert fresh[0] > plain[0] + 2 * 64 * MIB / RATE and fresh[1] == pytest.approx(plain[1])
    assert bounds == plain and plain[0] <= plain[1]


def test_the_formulas_say_so() -> None:
    graph = gpt2_graph(layers=1, hidden=64, heads=2, vocabulary=4096, seq=64, batch=256)
    breakdown = cost_breakdown(graph, fixed_candidate(graph, FRESH, FixedConfiguration()), FRESH, "adamw")
    with_pages = 0
    for row in operation_rows(graph, breakdown):
        lines = {name: (number, text) for name, number, text in row_formulas(row, breakdown)}
        found = breakdown.costs[row.cost.block].node(row.cost.plan)
        for name, seconds in (("forward", found.forward_seconds), ("backward", found.backward_seconds)):
            assert lines.get(name, (0.0, ""))[0] == pytest.approx(seconds, rel=1e-9)
            if f"{name} without fresh pages" in lines:
                with_pages += 1
                assert float(re.findall(r"= ([-+.e\d]+) seconds", lines[name][1])[-1]) == pytest.approx(seconds, rel=1e-5)
    assert with_pages >= 2
