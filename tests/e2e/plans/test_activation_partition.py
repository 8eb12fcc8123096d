"""Saved tensors in parts (ZeRO-R) on real ranks: training is that of one process, saved bytes are those of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from e2e.plans.test_saved_for_backward import TOKEN_BYTES, held, settled
from support.harness.end_to_end import Prepared, check_programs, prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.oracles.live_storages import Storages
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept, with_partition
from support.plans.mesh import mesh_of
from torch import Tensor

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import block_memory, call_saved_bytes
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.errors import PlanError
from autopar.ir.describe import describe
from autopar.ir.placement import Shard
from autopar.ir.plan import BlockPlan, Candidate, Precision
from autopar.ir.plan_file.document import divide_blocks, join_blocks
from autopar.ir.verify import verify_candidate
from autopar.passes.lower import lower
from autopar.program.build import program_text, render
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration

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
        partitioned(prepared, 1, 2, 0.4, {"dp": 2, "tp": 2}),
        partitioned(prepared, 2, 1, 0.6, {"dp": 1, "tp": 4}),
    ]
    texts = [program_text(prepared.graph, each) for each in plans]
    assert all("recompute.partition(" in text for text in texts)
    check_programs(ranks, prepared, texts)


def expected_bytes(prepared: Prepared, candidate: Candidate, plan: BlockPlan) -> tuple[float, float]:
    """Bytes that the forward of a block makes and leaves on a rank, by the plan; and without its partition. Inputs were there
    before; this rank's parts of them were not."""
    block = prepared.graph.block(plan.block)
    costs = BlockCosts(block, candidate.mesh, candidate.batch, CLUSTER)
    recompute = RecomputePlan.of(costs, plan)
    inputs = {recompute.same.find((value.name, at)) for value, at in zip(block.inputs, plan.inputs, strict=True)}
    whole = sum(size for storage, size in recompute.saved.items() if storage not in inputs)
    parts = {storage: recompute.saved[storage] / costs.mesh.sizes[axis] for storage, axis in recompute.partitioned.items()}
    left = sum(size for storage, size in recompute.saved.items() if storage not in {*inputs, *parts})
    return left + sum(parts.values()), whole


def megatron(prepared: Prepared, tp: int) -> Candidate:
    """Tensor parallelism without sequence parallelism: what is between the products is whole on each rank of tp."""
    candidate = fixed_candidate(prepared.graph, CLUSTER, FixedConfiguration(tp=tp, precision=F32))
    verify_candidate(prepared.graph, candidate)
    return candidate


def test_saved_bytes_are_those_of_the_plan(ranks: RankPool) -> None:
    """What is alive after the forward of each block, when all that it returned is dropped but the graph, without the
    inputs that were there before."""
    prepared = prepare("gpt2", torch.float32, batch=16)
    for tp in (4, 2):
        candidate = with_partition(prepared.graph, megatron(prepared, tp), CLUSTER, "tp")
        verify_candidate(prepared.graph, candidate)
        calls = prepared.graph.calls
        wanted = [expected_bytes(prepared, candidate, candidate.block(call.block)) for call in calls]
        layers = [number for number, call in enumerate(calls) if prepared.graph.count(call.block) > 1]
        assert layers and all(wanted[number][0] < wanted[number][1] for number in layers)
        slack = 64 + TOKEN_BYTES * 16 * 16 * tp // 4
        most = [1.02 * size + slack for size, _ in wanted]
        text = program_text(prepared.graph, candidate)
        found = ranks.run(held, text, prepared.state, prepared.batch, most, timeout=200)[0]
        for (size, _), (block, alive, _) in zip(wanted, found, strict=True):
            assert alive == pytest.approx(size, rel=0.02, abs=slack), (block, tp)


def test_bytes_between_forward_and_backward(ranks: RankPool) -> None:
    """Of the whole model: what a forward leaves falls by what the plan says."""
    prepared = prepare("gpt2", torch.float32, batch=16)
    plain = megatron(prepared, 4)
    plans = [plain, with_partition(prepared.graph, plain, CLUSTER, "tp")]
    texts = [program_text(prepared.graph, each) for each in plans]
    whole, parts = ranks.run(left_by_forward, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)[0]
    saved = []
    for each in plans:
        blocks = {plan.block: costs_of(prepared, each, plan.block) for plan in each.blocks}
        memory = {name: block_memory(costs, each.block(name)) for name, costs in blocks.items()}
        saved.append(sum(call_saved_bytes(prepared.graph, memory)))
    assert whole - parts == pytest.approx(saved[0] - saved[1], rel=0.03)
    assert whole - parts > 0.3 * saved[0]


def costs_of(prepared: Prepared, candidate: Candidate, block: str) -> BlockCosts:
    return BlockCosts(prepared.graph.block(block), candidate.mesh, candidate.batch, CLUSTER)


def left_by_forward(jobs: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]]) -> list[int]:
    """On a rank: of each program the bytes of storages that its forward makes and that are alive at its end."""
    found = []
    for text, state, batch in jobs:
        parallel = parallel_model(text, state)
        with Storages() as storages:
            loss = parallel(**batch)
        found.append(settled(storages.made, float("inf")))
        del loss
    return found


def test_the_plan_file_has_it_and_the_program_shows_it() -> None:
    prepared = prepare("gpt2", torch.float32, batch=16)
    candidate = with_partition(prepared.graph, megatron(prepared, 2), CLUSTER, "tp")
    assert join_blocks(*divide_blocks(prepared.graph, candidate)) == candidate.blocks
    lowered = lower(prepared.graph, candidate)
    text = render(lowered)
    assert "recompute.partition(hidden, tp)" in text.replace("h0", "hidden") and "# each rank of tp saves a part" in text
    assert "activations of" in describe(prepared.graph, candidate) and "saved in parts" in describe(prepared.graph, candidate)


def wrong(candidate: Candidate, **change: object) -> Candidate:
    """The repeated layer with something else in parts."""
    layer = max(candidate.blocks, key=lambda plan: len(plan.nodes))
    blocks = tuple(replace(plan, **change) if plan is layer else plan for plan in candidate.blocks)  # type: ignore[arg-type]
    return replace(candidate, blocks=blocks)


def test_wrong_plans_are_refused_in_one_line() -> None:
    prepared = prepare("gpt2", torch.float32, batch=16)
    candidate = with_partition(prepared.graph, megatron(prepared, 2), CLUSTER, "tp")
    layer = max(candidate.blocks, key=lambda plan: len(plan.nodes))
    (name, at, axis), *rest = layer.partition_saved
    sharded = next((node.node, node.results[0]) for node in layer.nodes if isinstance(node.results[0][1], Shard))
    cases = [
        (dict(partition_saved=((*sharded, axis),)), "each rank of tp saves a part of its own already"),
        (dict(partition_saved=((name, at, "dp"),)), "write a model axis"),
        (dict(partition_saved=((name, at, "ep"),)), "write a model axis"),
        (dict(partition_saved=(("nothing", at, axis),)), "which the block does not have"),
        (dict(partition_saved=((name, (Shard(1), at[1]), axis),)), "which the block does not have"),
        (dict(partition_saved=((name, at, axis), (name, at, axis))), "save it in one way"),
        (dict(offload=((name, at),)), "save it in one way"),
        (dict(recompute=True), "must be empty"),
    ]
    for change, words in cases:
        with pytest.raises(PlanError, match=words) as refused:
            verify_candidate(prepared.graph, wrong(candidate, **change))
        assert "\n" not in str(refused.value)
    assert rest
