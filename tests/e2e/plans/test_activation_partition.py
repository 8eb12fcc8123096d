"""Saved tensors in parts (ZeRO-R) on real ranks: training is that of one process, saved bytes are those of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from e2e.plans.test_saved_for_backward import TOKEN_BYTES, held
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.models.mesh import mesh_of
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept, with_partition

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.cost_models.tensors.aliases import aliases
from autopar.ir.plan import BlockPlan, Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.program.build import program_text

CLUSTER = Cluster.parse("local:4")
F64, F32 = Precision("float64", "float64"), Precision("float32", "float32")


def partitioned(
    prepared: Prepared, seed: int, many: int, recompute: float, axes: dict[str, int], precision: Precision = F64
) -> Candidate:
    """A drawn plan, in which a share is recomputed and all that is saved on every rank of tp is saved in parts."""
    drawn = drawn_candidate(prepared.graph, mesh_of(**axes), seed, wild=0.0, precision=precision)
    candidate = replace(drawn, micro_batches=many)
    if recompute:
        candidate = with_kept(prepared.graph, candidate, CLUSTER, seed, 1 - recompute, offload=0.1)
    candidate = with_partition(prepared.graph, candidate, CLUSTER, "tp")
    assert any(plan.partition_saved for plan in candidate.blocks)
    verify_candidate(prepared.graph, candidate)
    return candidate


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_trains_like_one_process(name: str, ranks: RankPool) -> None:
    """Losses, gradients, and parameters after three steps, with and without recomputation beside it."""
    prepared = prepare(name)
    plans = [
        partitioned(prepared, 0, 1, 0.0, {"dp": 1, "tp": 4}),
        partitioned(prepared, 1, 2, 0.4, {"dp": 2, "tp": 2}),
        partitioned(prepared, 2, 1, 0.6, {"dp": 1, "tp": 4}),
    ]
    texts = [program_text(prepared.graph, each) for each in plans]
    assert all("recompute.partition(" in text for text in texts)
    results = ranks.run(train_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)
    for rank in (0, 3):
        for text, found in zip(texts, results[rank], strict=True):
            wrong = differences(found, prepared.expected, 1e-9)
            assert not wrong, f"rank {rank}: {wrong[:5]}\n{text}"


def expected_bytes(prepared: Prepared, candidate: Candidate, plan: BlockPlan) -> tuple[float, float]:
    """Bytes that the forward of a block makes and leaves on a rank, by the plan; and without its partition. Inputs were there
    before; this rank's parts of them were not."""
    block = prepared.graph.block(plan.block)
    costs, same = BlockCosts(block, candidate.mesh, candidate.batch, CLUSTER), aliases(block, plan.nodes, plan.conversions)
    recompute = RecomputePlan.of(costs, plan, same)
    inputs = {same.find((value.name, at)) for value, at in zip(block.inputs, plan.inputs, strict=True)}
    whole = sum(size for storage, size in recompute.saved.items() if storage not in inputs)
    parts = {storage: recompute.saved[storage] / costs.mesh.sizes[axis] for storage, axis in recompute.partitioned.items()}
    left = sum(size for storage, size in recompute.saved.items() if storage not in {*inputs, *parts})
    return left + sum(parts.values()), whole


def test_saved_bytes_are_those_of_the_plan(ranks: RankPool) -> None:
    """What is alive after the forward of each block, when all that it returned is dropped but the graph."""
    prepared = prepare("gpt2", torch.float32, batch=16)
    for seed, axes in ((3, {"dp": 1, "tp": 4}), (4, {"dp": 2, "tp": 2})):
        candidate = partitioned(prepared, seed, 1, 0.0, axes, F32)
        wanted = [expected_bytes(prepared, candidate, candidate.block(call.block)) for call in prepared.graph.calls]
        layers = [number for number, call in enumerate(prepared.graph.calls) if candidate.block(call.block).partition_saved]
        assert sum(wanted[number][0] for number in layers) < 0.9 * sum(wanted[number][1] for number in layers)
        slack = 64 + TOKEN_BYTES * 16 * 16 // axes["dp"]
        most = [1.02 * size + slack for size, _ in wanted]
        text = program_text(prepared.graph, candidate)
        found = ranks.run(held, text, prepared.state, prepared.batch, most, timeout=200)[0]
        for (size, _), (block, alive, _) in zip(wanted, found, strict=True):
            assert alive == pytest.approx(size, rel=0.02, abs=slack), (block, axes)
