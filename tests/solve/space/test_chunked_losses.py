"""The search takes a loss in chunks of tokens where whole logits do not fit, and only there; and what the plan says it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from support.plans.forced_plans import forced_search, with_losses_in_chunks
from support.plans.pipeline_plans import with_candidate
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import load_plan
from autopar.program.build import program_text
from autopar.rules.check import check_strategies
from autopar.rules.loss_chunks import loss_chains
from autopar.rules.registry import default_registry
from autopar.solve.result import PlanResult

BATCH, SEQUENCE, WIDTH, CLASSES = 16, 512, 64, 4096
LOGITS = BATCH // 2 * SEQUENCE * CLASSES * 4
"""The bytes of one rank's logits."""
CHUNKED = "C.linear_cross_entropy_sum("


class Words(nn.Module):
    """A layer and a head of many classes. `also` says what else reads the logits."""

    def __init__(self, also: str = "") -> None:
        super().__init__()
        self.also = also
        self.embed, self.layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.head(self.layer(self.embed(ids)).relu())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.also == "term":  # a z-loss
            return loss + 1e-4 * logits.logsumexp(-1).square().mean()
        return (loss, logits) if self.also else loss


@cache
def graph_of(also: str = "", dtype: str = "float32") -> Graph:
    with torch.device("meta"):
        model, ids = Words(also), torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    outputs = ("1",) if also == "result" else ()
    return capture(model, (ids, ids), compute_dtype=dtype, **({"outputs": outputs} if outputs else {}))  # type: ignore[arg-type]


def plan_within(memory_bytes: int = 0) -> PlanResult:
    cluster = Cluster.parse("local:2")
    device = replace(cluster.device, memory_bytes=memory_bytes or cluster.device.memory_bytes)
    return forced_search(graph_of(), "dp=2,micro=8", cluster=replace(cluster, device=device))


def test_chunks_are_taken_where_whole_logits_do_not_fit() -> None:
    wide = plan_within()
    assert CHUNKED not in program_text(wide.graph, wide.candidate)
    least = evaluate(wide.graph, with_losses_in_chunks(wide.graph, wide.candidate), Cluster.parse("local:2"))
    assert least.peak_memory_bytes + 2 * LOGITS < wide.evaluation.peak_memory_bytes
    assert least.step_seconds > wide.evaluation.step_seconds
    tight = plan_within(int(1.15 * least.peak_memory_bytes))
    assert CHUNKED in program_text(tight.graph, tight.candidate)
    assert tight.evaluation.step_seconds <= 1.02 * least.step_seconds


@pytest.mark.parametrize("also", ["term", "result"])
def test_logits_that_something_else_reads_stay_whole(also: str) -> None:
    assert [[node.op for node in chain] for chain in loss_chains(graph_of().blocks[-1])] == [
        ["aten.linear", "ap.cross_entropy_sum"]
    ]
    assert not any(map(loss_chains, graph_of(also).blocks))


def test_half_precision() -> None:
    """float16 may overflow where gradients are made before the loss is scaled."""
    assert any(map(loss_chains, graph_of(dtype="bfloat16").blocks))
    assert not any(map(loss_chains, graph_of(dtype="float16").blocks))


def test_a_part_of_a_chain_in_chunks_is_refused() -> None:
    graph, candidate = plan_within().graph, with_losses_in_chunks(graph_of(), plan_within().candidate)
    check_strategies(graph, candidate, default_registry())
    for node in loss_chains(graph.blocks[-1])[0]:
        wrong = _with_function(candidate, node.name, "")
        with pytest.raises(PlanError, match="plan the model again"):
            check_strategies(graph, wrong, default_registry())


def test_the_program_holds_what_is_predicted(tmp_path: Path, ranks: RankPool) -> None:
    """In float32 and bfloat16 on fake tensors: parameters, gradients, activations and one chunk of logits."""
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    predicted = []
    for dtype in ("float32", "bf16"):
        plan = autopar.plan(Words(), "local:2", (ids, ids), force="dp=2,micro=8,zero=0", precision=dtype)
        candidate = with_losses_in_chunks(plan.graph, plan.candidate)
        evaluation = evaluate(plan.graph, candidate, Cluster.parse("local:2"))
        table = dict(evaluation.memory)
        predicted.append(evaluation.peak_memory_bytes - table["base"] - table["slack"])
        assert predicted[-1] < LOGITS
        with_candidate(plan, candidate).save(str(tmp_path / f"{dtype}.json"))
    held = ranks.run_alone(held_bytes, [str(tmp_path / f"{dtype}.json") for dtype in ("float32", "bf16")], timeout=100)
    assert predicted == pytest.approx(held, rel=0.05)


def held_bytes(paths: Sequence[str]) -> list[int]:
    """In a process of its own."""
    from autopar.dryrun.run import dry_run

    return [dry_run(load_plan(path), 0).peak_bytes for path in paths]


def _with_function(candidate: Candidate, node: str, function: str) -> Candidate:
    blocks = [
        replace(block, nodes=tuple(replace(each, function=function) if each.node == node else each for each in block.nodes))
        for block in candidate.blocks
    ]
    return replace(candidate, blocks=tuple(blocks))
