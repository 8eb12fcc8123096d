"""Models that call torch's `varlen_attn`: attention within documents on 4 ranks, against one process that attends to one document
at a time."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.harness.end_to_end import Prepared, check_programs, plan, prepare_model, program, sharding_wins
from support.harness.rank_pool import RankError, RankPool
from support.models.varlen_models import VarlenModel, packed_tokens
from support.plans.sequence_sharding import sequence_plan

import autopar
from autopar.capture import capture
from autopar.capture.tracing.data.varlen import VarlenAttention, one_at_a_time
from autopar.errors import BatchError
from autopar.program.build import program_text

ROWS = (5, 7, 12, 24, 3, 1, 0, 20, 11, 13)
"""Documents that end where rows of 24 tokens do."""
BATCHES = {
    "rows": packed_tokens(ROWS, (4, 24)),
    "one row": packed_tokens((5, 43, 2, 46), (1, 96)),
    "tokens": packed_tokens((5, 43, 2, 46), (96,)),
}
MODELS = {"causal": ((-1, 0), None), "window": ((3, 0), 0.3), "whole": ((-1, -1), None)}


@cache
def prepared(form: str, kind: str = "causal") -> Prepared:
    torch.manual_seed(0)
    model, batch = VarlenModel(*MODELS[kind]).double(), BATCHES[form]
    graph = capture(model, (), batch, compute_dtype="float64")
    assert {node.op for block in graph.blocks for node in block.nodes if "attention" in node.op} == {"ap.attention_documents"}
    with VarlenAttention(one_at_a_time):
        return prepare_model(f"{form}, {kind}", model, batch, graph, lift=True)


SLOW = [pytest.param("rows", kind, marks=pytest.mark.slow) for kind in ("window", "whole")]


@pytest.mark.parametrize(("form", "kind"), [("rows", "causal"), ("tokens", "window"), *SLOW])
def test_degrees_equal_one_process(form: str, kind: str, ranks: RankPool) -> None:
    forces: tuple[dict[str, int], ...] = ({"dp": 4, "zero": 3}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 2})
    case = prepared(form, kind)
    check_programs(ranks, case, [program(case, plan(case, force)) for force in forces])


@pytest.mark.parametrize("form", [pytest.param("rows", marks=pytest.mark.slow), "one row"])
def test_a_sharded_sequence_equals_one_process(form: str, ranks: RankPool) -> None:
    """The heads of one key head are on two ranks, or a shard begins and ends within documents."""
    case = prepared(form)
    for size, kinds in ((2, ("exchange", "queries", "documents_ring")), (4, ("queries", "documents_ring"))):
        texts = [program_text(case.graph, sequence_plan(case.graph, size, kind, sharding_wins(size))) for kind in kinds]
        check_programs(ranks, case, texts, world=size)


def calls(force: str) -> tuple[list[str], list[tuple[float, float]]]:
    """On a rank: what is said of lengths that do not fit, and the losses of calls beside those of one process."""
    torch.manual_seed(0)
    model, batch = VarlenModel().double(), BATCHES["rows"]
    parallel = autopar.parallelize(model, "local:2", batch, force=force, precision="float64", cache=False)
    said, losses = [], []
    for lengths in ((5, 85), (5, 7, 12, 24, 48, 3), (5, 19, 20, 28, 24)):  # two ends that are none, and a row within a document
        with pytest.raises(BatchError, match=r"^[^\n]+$") as caught:
            parallel(**batch | packed_tokens(lengths, (4, 24)))
        said.append(str(caught.value))
    for lengths in (ROWS, (24, 5, 19, 24, 24), (24, 5, 0, 19, 24, 24)):  # other numbers of documents
        given = packed_tokens(lengths, (4, 24))
        with VarlenAttention(one_at_a_time):
            losses.append((float(parallel(**given).detach()), float(model(**given).detach())))
    return said, losses


@pytest.mark.parametrize("force", ["dp=2", pytest.param("tp=2", marks=pytest.mark.slow)])
def test_calls_with_other_documents(force: str, ranks: RankPool) -> None:
    for said, losses in ranks.run(calls, force, world=2, timeout=120):
        assert "end at 90, of 96 tokens" in said[0] and "end at 99" in said[1] and "reaches over token 48" in said[2]
        for found, right in losses:
            assert found == pytest.approx(right, rel=1e-12)


def one_rank_has_other_lengths() -> None:
    """On a rank: after the calls whose batches are compared, one rank's lengths do not fit."""
    batch = BATCHES["rows"]
    parallel = autopar.parallelize(VarlenModel().double(), "local:2", batch, force="dp=2", precision="float64", cache=False)
    for _ in range(4):
        parallel(**batch).backward()
    if dist.get_rank():
        batch = batch | {"cu_seqlens": batch["cu_seqlens"] + 1}
    parallel(**batch).backward()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the pool's, of a rank that has ended
def test_lengths_of_one_rank_end_the_others(ranks: RankPool) -> None:
    """None waits for the rank that failed."""
    others = RankPool(ranks.template)
    try:
        with pytest.raises(RankError) as caught:
            others.run(one_rank_has_other_lengths, world=2, timeout=60)
    finally:
        others.close()
    said = str(caught.value)
    assert "gave no answer" not in said and ("end at 97, of 96" in said or "status 1" in said)
