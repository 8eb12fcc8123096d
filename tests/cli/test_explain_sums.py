"""Every table of `autopar explain` adds up to one step of one stage: dense plans, pipelines and mixtures of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plans.tiny_plans import tiny_plan

import autopar
from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cost_models.breakdown.cost_breakdown import cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.explain.operation_and_collective_rows import collective_rows, operation_rows, other_collectives, other_operations
from autopar.explain.reasons import parts_of_step
from autopar.ir.plan_file.plan_file import Plan

FORCED = {
    "recomputed": ("gpt2-tiny", "tp=2,pp=1,zero=3,micro_batches=2,recompute=full,zero_group=0,sequence_parallel=0"),
    "long pipeline": ("gpt2-tiny", "pp=4,dp=2,zero=2"),
    "state groups": ("llama-tiny", "dp=8,zero=2,zero_group=4,micro=2"),
}


def plan_of(kind: str) -> Plan:
    if kind not in FORCED:
        return tiny_plan(kind)
    name, force = FORCED[kind]
    loaded = load_model(name, 16, None, device="meta")
    return autopar.plan(loaded.model, "dgx-h100:1", loaded.example_inputs, force=force, batch=16)


@pytest.mark.parametrize("kind", ["dense", "pipeline", "mixture", *FORCED])
def test_tables_add_up(kind: str) -> None:
    plan = plan_of(kind)
    graph, cluster, optimizer = plan.graph, Cluster.from_dict(plan.document.cluster.description), plan.document.optimizer
    evaluation = evaluate(graph, plan.candidate, cluster, optimizer)
    breakdown = cost_breakdown(graph, plan.candidate, cluster, optimizer, evaluation.bottleneck)
    step, parts = evaluation.step_seconds, parts_of_step(evaluation)
    assert sum(seconds for _, seconds in parts) == pytest.approx(step, rel=1e-5)
    operations, collectives = operation_rows(graph, breakdown), collective_rows(graph, breakdown)
    for shown in (0, 10, len(operations)):
        others = dict(other_operations(operations[shown:], breakdown, parts))
        assert sum(row.seconds for row in operations[:shown]) + sum(others.values()) == pytest.approx(step, rel=1e-5)
    by_axis = dict.fromkeys(plan.candidate.mesh.names, 0.0)
    for row in collectives:
        by_axis[row.axis] += row.seconds
    assert by_axis == pytest.approx(dict(evaluation.axis_seconds), rel=1e-9, abs=1e-12)
    rest = sum(seconds for _, seconds in other_collectives(collectives[3:]))
    assert sum(row.seconds for row in collectives[:3]) + rest == pytest.approx(sum(by_axis.values()), rel=1e-9)
    assert all(row.seconds <= sum(by_axis.values()) for row in collectives)


@pytest.mark.parametrize("kind", ["dense", "pipeline", "mixture"])
def test_printed_shares_add_up_to_all(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    tiny_plan(kind).save(path)
    assert main(["explain", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step = found["step_seconds"]
    assert sum(found["parts"].values()) == pytest.approx(step, rel=1e-5)
    assert sum(each["share"] for each in found["ops"]) + sum(found["other_ops"].values()) / step == pytest.approx(1, rel=1e-5)
    assert main(["explain", path]) == 0
    text = capsys.readouterr().out
    assert ("of stage " in text) == (kind == "pipeline")
    for title in ("The costliest operations", "The costliest collectives"):
        lines = [line.strip() for line in text[text.index(title) :].splitlines()]
        end = lines.index("", lines.index("") + 1)
        shares = [float(line.split()[-2]) for line in lines[:end] if line.endswith(" %")]
        assert sum(shares) == pytest.approx(100, abs=0.5), (title, shares)
