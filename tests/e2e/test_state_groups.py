"""State cut over neighbours of the data axis and equal between their groups (HSDP): exact, and sent as the cost model says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.candidates import drawn_candidate, mesh_of
from support.endtoend import Prepared, differences, prepare, run_programs
from support.ranks import RankError, Ranks
from torch import Tensor

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.state import optimizer_named
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.passes.pipeline import lower
from autopar.program.source import render

TOLERANCE = 1e-9
F64 = Precision("float64", "float64")


def planned(prepared: Prepared, zero: int, group: int, many: int = 1, **axes: int) -> Candidate:
    drawn = drawn_candidate(prepared.graph, mesh_of(**axes), 1, zero=zero, wild=0.0, precision=F64)
    candidate = replace(drawn, micro_batches=many, zero_group=group)
    verify_candidate(prepared.graph, candidate)
    return candidate


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_trains_like_one_process(name: str, ranks: Ranks) -> None:
    """Embeddings of GPT-2 are tied, so that there is shared state at the root as well."""
    prepared = prepare(name)
    cases = [(1, 2, 1), (2, 2, 2), (3, 2, 2), (3, 2, 1), (3, 1, 1), (1, 2, 2)][: 3 if name == "gpt2" else 6]
    texts = [render(lower(prepared.graph, planned(prepared, *case, dp=4))) for case in cases]
    assert "    zero_group = 2  # neighbours that share one copy of the state\n" in texts[0]
    results = ranks.run(run_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)
    for rank in range(4):
        for case, found in zip(cases, results[rank], strict=True):
            assert not differences(found, prepared.expected, TOLERANCE), (case, rank)


def sent(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict[tuple[str, str], tuple[int, int]], float]:
    """On a rank: collectives of one step by kind and axis, how many and their bytes; and the norm of all gradients."""
    from autopar.dryrun.run import watch_steps
    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    made = load(text).Program
    parallel = Parallel(made(MeshHandle(made.mesh_axes)), state)
    found = watch_steps(parallel, batch, torch.optim.SGD(parallel.parameters(), lr=0.0), 0)
    parallel(**batch).backward()
    norm = parallel.clip_grad_norm_(1e9).item()
    return {(each.kind, each.axis): (each.count, each.bytes) for each in found.collectives}, norm


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_moves_as_the_cost_model_says(zero: int, ranks: Ranks) -> None:
    """Bytes that ZeRO sends, in one step of Llama: gathers and reductions in a group, sums between groups."""
    prepared = prepare("llama")
    candidate = planned(prepared, zero, 2, dp=4)
    cluster, optimizer = Cluster.parse("local:4"), optimizer_named("sgd")
    priced: list[Any] = []
    for call in prepared.graph.calls:
        block, plan = prepared.graph.block(call.block), candidate.block(call.block)
        costs = BlockCosts(block, candidate.mesh, candidate.batch, cluster, candidate.zero_group)
        if block.parameters:
            priced.append(costs.state(zip(block.parameters, plan.parameters, strict=True), zero, F64, optimizer))
    (found, norm), *_ = ranks.run(sent, render(lower(prepared.graph, candidate)), prepared.state, prepared.batch)
    gathers, reduced = sum(each.gather_bytes for each in priced), sum(each.reduce_bytes for each in priced)
    again = sum(each.gather_bytes for each in priced[:-1]) if zero == 3 else 0  # the last keeps its weights for its backward
    assert found["all-gather", "dp_shard"] == ((2 if zero == 3 else 1) * len(priced) - (zero == 3), gathers + again)
    assert found["reduce-scatter", "dp_shard"] == (len(priced), reduced)
    assert found["all-reduce", "dp_copy"] == (len(priced), reduced / 2)
    expected = torch.stack([gradient.norm() for gradient in prepared.expected[1].values()]).norm()
    assert norm == pytest.approx(expected.item(), rel=TOLERANCE)


def misplaced() -> None:
    from autopar.runtime.mesh import MeshHandle

    MeshHandle({"dp": 4}).share_state(3)


def test_groups_divide_the_data_axis(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="groups of 3 does not divide dp=4"):
        ranks.run(misplaced)
