"""Mixtures of experts on real processes equal the single process, however their experts and tokens are dealt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import check_programs, prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.harness.training_loop import parallel_model
from support.models.routed_mlp import RoutedMlp
from support.plans.expert_forms import FORMS, text_of
from support.plans.pipeline_plans import candidate_text as text_of_pipeline
from support.plans.pipeline_plans import pipeline_candidate

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import ClusterError
from autopar.ir.plan import Pipeline, Precision
from autopar.rules.registry import default_registry
from autopar.solve.search import search
from autopar.solve.space.micro_batches import why_one_micro_batch
from autopar.solve.space.options import SearchOptions

COVERING = {
    "mixtral": ("dispatched, dp=2,ep=2",),
    "deepseek_v3": ("dispatched, in micro-batches",),
    "gpt_oss": ("dispatched, ep=2,tp=2",),
    "routed": ("inside, dp=2,tp=2", "dispatched, ep=4", "dispatched, ep=2,tp=2"),
    "routed_capacity": ("owned, dp=2,tp=2", "dispatched, ep=4"),
    "routed_capacity_flat": ("inside, dp=2,tp=2", "dispatched, dp=2,ep=2"),
}


def check(name: str, forms: tuple[str, ...], ranks: RankPool) -> None:
    """Programs for all forms, one after another on the same processes."""
    prepared = prepare(name)
    programs = [text_of(prepared, form) for form in forms]
    check_programs(ranks, prepared, programs, forms)


@pytest.mark.parametrize("name", COVERING)
def test_equals_one_process(name: str, ranks: RankPool) -> None:
    check(name, COVERING[name], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COVERING, "qwen3_moe"])
def test_whole_matrix(name: str, ranks: RankPool) -> None:
    in_parts = not why_one_micro_batch(prepare(name).graph, default_registry())
    forms = {form: force for form, (_, force) in FORMS.items() if force != {"dp": 1, "ep": 2}}  # two processes
    check(name, tuple(form for form, force in forms.items() if in_parts or "micro" not in force), ranks)


@pytest.mark.parametrize(
    ("name", "reason"), [("routed", "routed_mlp.py"), ("routed_capacity_flat", "routed_mlp.py"), pytest.param("mixtral", "histc")]
)
def test_reasons_against_micro_batches(name: str, reason: str) -> None:
    """Balancing losses are products of means over the batch, and a capacity over all tokens needs all tokens."""
    assert reason in why_one_micro_batch(prepare(name).graph, default_registry())


def load_on_rank(text: str, state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], backend: str) -> list[Any]:

    parallel = parallel_model(text, state, compile=backend)
    with parallel.expert_load() as loads:
        parallel(**batch).backward()
    return [(each.by_rank, each.by_expert, each.imbalance) for each in loads]


def test_expert_load_is_counted(ranks: RankPool) -> None:
    """Tokens per expert and per rank of a step, against the routing of the original model."""
    prepared = prepare("routed")
    model = RoutedMlp().double()
    model.load_state_dict(prepared.state)
    chosen = model.gate(model.norm(prepared.batch["x"])).topk(2, -1).indices
    counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
    by_two = (counts[0] + counts[1], counts[2] + counts[3])
    for force, backend, by_rank in (
        ("dispatched, ep=4", "", tuple(counts)), ("owned, tp=4", "", tuple(counts)), ("dispatched, ep=2", "aot_eager", by_two)
    ):  # fmt: skip
        world = len(by_rank)
        for (load,) in ranks.run(load_on_rank, text_of(prepared, force), prepared.state, prepared.batch, backend, world=world):
            assert load == (by_rank, tuple(counts), max(by_rank) * world / sum(counts))


def test_pipeline_with_split_backward(ranks: RankPool) -> None:
    """The experts' weights get their gradients with their inputs; micro-batches interleave."""
    prepared = prepare("deepseek_v3")
    candidate = pipeline_candidate(prepared, {"tp": 2}, Pipeline(2, 1, "zb-h1"), 4)
    text = text_of_pipeline(prepared, candidate)
    assert "C.moe_experts_owned(" in text
    for rank, ((found, trace),) in enumerate(ranks.run(train_pipelines, [(text, prepared.state, prepared.batch)], timeout=200)):
        assert any("W" in action for action in trace)
        expected = prepared.expected
        there = {name: expected.parameters[name] for name in found.parameters if name in expected.parameters}
        mine = {name: found.parameters[name] for name in there}
        wrong = differences(found._replace(parameters=mine, buffers={}), expected._replace(parameters=there), 1e-9)
        assert there and not wrong, f"rank {rank}: {wrong[:5]}"


def test_experts_that_do_not_divide_are_refused() -> None:
    prepared = prepare("routed")
    options = SearchOptions(batch=24, precision=Precision("float64", "float64"), force={"pp": 1, "ep": 3})
    with pytest.raises(ClusterError, match=r"ep=3 does not divide the 4 experts of .*routed_mlp\.py:\d+\): force a divisor of 4"):
        search(replace(prepared.graph, batch=24), Cluster.parse("local:3"), options)
