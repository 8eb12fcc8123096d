"""State cut over neighbours of the data axis and equal between their groups (HSDP): exact, and sent as the cost model says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankError, RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import parallel_model
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.program.build import program_text

TOLERANCE = 1e-9
F64 = Precision("float64", "float64")


def planned(prepared: Prepared, zero: int, group: int, many: int = 1, **axes: int) -> Candidate:
    drawn = drawn_candidate(prepared.graph, mesh_of(**axes), 1, zero=zero, wild=0.0, precision=F64)
    candidate = replace(drawn, micro_batches=many, zero_group=group)
    verify_candidate(prepared.graph, candidate)
    return candidate


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_trains_like_one_process(name: str, ranks: RankPool) -> None:
    """Embeddings of GPT-2 are tied, so that there is shared state at the root as well."""
    prepared = prepare(name)
    cases = [(1, 2, 1), (2, 2, 2), (3, 2, 2), (3, 2, 1), (3, 1, 1), (1, 2, 2)][: 3 if name == "gpt2" else 6]
    texts = [program_text(prepared.graph, planned(prepared, *case, dp=4)) for case in cases]
    assert "    zero_group = 2  # neighbouring data ranks that shard one copy of the state\n" in texts[0]
    results = ranks.run(train_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)
    for rank in range(4):
        for case, found in zip(cases, results[rank], strict=True):
            assert not differences(found, prepared.expected, TOLERANCE), (case, rank)


def sent(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict[tuple[str, str], tuple[int, int]], float]:
    """On a rank: collectives of one step by kind and axis, how many and their bytes; and the norm of all gradients."""
    from autopar.dryrun.run import watch_steps

    parallel = parallel_model(text, state, check_every=0)
    found = watch_steps(parallel, batch, torch.optim.SGD(parallel.parameters(), lr=0.0), 0)
    parallel(**batch).backward()
    norm = parallel.clip_grad_norm_(1e9).item()
    return {(each.kind, each.axis): (each.count, each.bytes) for each in found.collectives}, norm


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_communication_is_the_predicted_one(zero: int, ranks: RankPool) -> None:
    """Bytes that ZeRO sends, in one step of Llama: gathers and reductions in a group, sums between groups."""
    prepared = prepare("llama")
    candidate = planned(prepared, zero, 2, dp=4)
    cluster, optimizer = Cluster.parse("local:4"), optimizer_named("sgd")
    priced: list[Any] = []
    for call in prepared.graph.calls:
        block, plan = prepared.graph.block(call.block), candidate.block(call.block)
        costs = BlockCosts(block, candidate.mesh, candidate.batch, cluster, candidate.zero_group)
        if block.parameters:
            priced.append(costs.state_cost(zip(block.parameters, plan.parameters, strict=True), zero, F64, optimizer))
    (found, norm), *_ = ranks.run(sent, program_text(prepared.graph, candidate), prepared.state, prepared.batch)
    gathers, reduced = sum(each.gather_bytes for each in priced), sum(each.reduce_bytes for each in priced)
    again = sum(each.gather_bytes for each in priced[:-1]) if zero == 3 else 0  # the last keeps its weights for its backward
    assert found["all-gather", "dp_shard"] == ((2 if zero == 3 else 1) * len(priced) - (zero == 3), gathers + again)
    assert found["reduce-scatter", "dp_shard"] == (len(priced), reduced)
    assert found["all-reduce", "dp_replicate"] == (len(priced), reduced / 2)
    expected = torch.stack([gradient.norm() for gradient in prepared.expected[1].values()]).norm()
    assert norm == pytest.approx(expected.item(), rel=TOLERANCE)


def misplaced() -> None:
    from autopar.runtime.device.mesh import MeshHandle

    MeshHandle({"dp": 4}).group_state(3)


def test_groups_divide_the_data_axis(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="groups of 3 does not divide dp=4"):
        ranks.run(misplaced)
