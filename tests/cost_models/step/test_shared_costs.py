"""Costs that candidates share say what costs of their own say, and price a node of one mesh and micro-batch once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step import block_costs
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.evaluate import SharedCosts, evaluate
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration

GRAPH = gpt2_graph(layers=3, hidden=128, heads=4, vocabulary=512, seq=64, batch=16)
CLUSTER = Cluster.parse("dgx-a100:1")
CONFIGURATIONS = [
    FixedConfiguration(tp=tp, pp=pp, zero=zero, micro_batches=2, recompute=recompute)
    for tp, pp in ((1, 1), (2, 1), (1, 2))
    for zero in (0, 1)
    for recompute in ("none", "full")
]


def test_shared_costs_are_those_of_each_candidate() -> None:
    shared = SharedCosts(GRAPH, CLUSTER)
    for each in CONFIGURATIONS:
        candidate = fixed_candidate(GRAPH, CLUSTER, each)
        assert evaluate(GRAPH, candidate, CLUSTER, costs=shared.of(candidate)) == evaluate(GRAPH, candidate, CLUSTER)


def test_a_node_is_priced_once_whatever_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fixed_candidate(GRAPH, CLUSTER, CONFIGURATIONS[0])
    priced: list[str] = []
    node_cost = block_costs.node_cost
    monkeypatch.setattr(block_costs, "node_cost", lambda node, *rest: priced.append(node.name) or node_cost(node, *rest))
    shared = SharedCosts(GRAPH, CLUSTER)
    evaluate(GRAPH, plain, CLUSTER, costs=shared.of(plain))
    assert len(priced) == sum(len(block.nodes) for block in GRAPH.blocks)
    recomputed = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    evaluate(GRAPH, recomputed, CLUSTER, costs=shared.of(recomputed))
    assert len(priced) == sum(len(block.nodes) for block in GRAPH.blocks)


def test_blocks_that_do_not_change_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when one offloaded tensor after another is saved on the device instead (`trim_offload`)."""
    traced: list[str] = []
    of = CallTrace.of

    def counted(costs: BlockCosts, plan) -> CallTrace:  # type: ignore[no-untyped-def]
        traced.append(plan.block)
        return of(costs, plan)

    monkeypatch.setattr(CallTrace, "of", counted)
    shared = SharedCosts(GRAPH, CLUSTER)
    plain = fixed_candidate(GRAPH, CLUSTER, CONFIGURATIONS[0])
    evaluate(GRAPH, plain, CLUSTER, costs=shared.of(plain))
    changed = replace(plain, blocks=(replace(plain.blocks[0], recompute=True), *plain.blocks[1:]))
    evaluate(GRAPH, changed, CLUSTER, costs=shared.of(changed))
    assert traced == [*(plan.block for plan in plain.blocks), plain.blocks[0].block]
