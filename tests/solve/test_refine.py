"""The schedule that a chosen pipeline gets for its own times: better by the evaluator's word or not taken, and it can run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.harness.end_to_end import prepare

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan import Precision
from autopar.schedules.check import check
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.solve.choice import with_synthesized_schedule
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def found(force: dict[str, int], batch: int = 32) -> PlanResult:
    """A pipeline on one node, whose head is far from even."""
    graph = replace(prepare("gpt2_deep", batch=16).graph, batch=batch)
    options = SearchOptions(batch=batch, precision=Precision("float64", "float64"), force=force)
    return search(graph, Cluster.parse("dgx-h100:1"), options)


def test_it_is_taken_where_it_is_better() -> None:
    cluster, before = Cluster.parse("dgx-h100:1"), found({"pp": 8})
    said: list[str] = []
    after = with_synthesized_schedule(cluster, before, "adamw", forced=True, progress=said.append)
    assert len(said) == 1 and "synthesized" in said[0]
    pipeline = after.candidate.pipeline
    if pipeline.schedule != "synthesized":
        assert after is before and "stays" in said[0]
        return
    assert after.evaluation.step_seconds < before.evaluation.step_seconds and after.evaluation.fits
    assert after.gap <= before.gap and after.lower_bound_seconds <= after.evaluation.step_seconds
    schedule = schedule_of(pipeline, after.candidate.micro_batches)
    check(schedule)
    again = evaluate(before.graph, after.candidate, cluster)
    assert again.step_seconds == pytest.approx(after.evaluation.step_seconds, rel=1e-12)


def test_no_bound_stands_above_the_plan() -> None:
    """Bounds are of named schedules: where the synthesized one is faster than they allow, its step is the bound."""
    before = found({"pp": 8})
    tight = replace(before, lower_bound_seconds=before.evaluation.step_seconds, gap=0.0)
    after = with_synthesized_schedule(Cluster.parse("dgx-h100:1"), tight, "adamw", forced=True)
    assert after.candidate.pipeline.schedule == "synthesized" and after.evaluation.step_seconds < before.evaluation.step_seconds
    assert after.lower_bound_seconds == after.evaluation.step_seconds and after.gap == 0


def test_what_has_no_pipeline_stays() -> None:
    before = found({"pp": 1, "dp": 8})
    assert with_synthesized_schedule(Cluster.parse("dgx-h100:1"), before, "adamw", forced=True) is before
