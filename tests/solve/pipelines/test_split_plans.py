"""Plans of compiled blocks run under schedules that split the backward, where blocks are not compiled and save other tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import drawn_graph, llama_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept, with_partition
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.recompute import RecomputePlan, with_saved_only
from autopar.errors import PlanError

GRAPHS = {
    "gpt2": lambda: gpt2_graph(layers=2, dtype="bfloat16", batch=8),
    "llama": lambda: llama_graph(layers=2, batch=8, seq=512),
    "drawn": lambda: drawn_graph(5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_left_is_saved_and_nothing_else_goes(name: str) -> None:
    graph, cluster = GRAPHS[name](), with_compilation(Cluster.parse("dgx-h100:1"), True)
    dropped = 0
    for seed in range(6):
        candidate = drawn_candidate(graph, mesh_of(dp=2, tp=4), seed)
        parts = with_partition(graph, candidate, cluster, "tp")
        for plan in (*parts.blocks, *with_kept(graph, candidate, cluster, seed, 0.6, offload=0.5).blocks):
            costs = BlockCosts(graph.block(plan.block), candidate.mesh, candidate.micro_batch, cluster)
            left = with_saved_only(costs.eager, plan)
            RecomputePlan.of(costs.eager, left)
            assert with_saved_only(costs, plan) == plan
            for kind in ("offload", "partition_saved"):
                for each in set(getattr(plan, kind)) - set(getattr(left, kind)):
                    dropped += 1
                    with pytest.raises(PlanError, match="which is not saved"):
                        RecomputePlan.of(costs.eager, replace(left, **{kind: (*getattr(left, kind), each)}))
    assert dropped or name == "drawn"
