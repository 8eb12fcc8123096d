"""``inspect --timeline``: drawn as wide as the terminal, with the times of the evaluator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plans.pipeline_plans import with_candidate

import autopar
from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cli.console import seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.document import ClusterInfo
from autopar.ir.plan_file.plan_file import Plan
from autopar.schedules.pipeline_schedule import schedule_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a plan of GPT-2 with this pipeline on two devices."""
    loaded = load_model("gpt2-tiny", 8, None)
    plan = autopar.plan(loaded.model, "local:2", loaded.example_inputs, force="dp=2", name="gpt2-tiny")
    mesh = replace(plan.candidate.mesh, axes=tuple(replace(axis, size=1) for axis in plan.candidate.mesh.axes))
    folder = tmp_path_factory.mktemp("plans")

    def write(pipeline: Pipeline, micro_batches: int, described: bool = True) -> tuple[Path, Plan]:
        document = plan.document
        cluster = document.cluster if described else ClusterInfo(document.cluster.name, document.cluster.devices)
        candidate = replace(plan.candidate, mesh=mesh, micro_batches=micro_batches, pipeline=pipeline)
        found = with_candidate(plan, candidate, cluster=cluster, predicted=document.predicted)
        path = folder / f"{pipeline.schedule}-{micro_batches}-{described}.json"
        found.save(str(path))
        return path, found

    return write


@pytest.mark.parametrize("width", [60, 160])
@pytest.mark.parametrize(("name", "micro"), [("1f1b", 4), ("gpipe", 8), ("zb-h1", 2)])
def test_timeline_is_the_evaluators(
    made: Any, name: str, micro: int, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plan = made(Pipeline(2, 1, name), micro)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["inspect", str(path), "--timeline"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("rank ") and "|" in line]
    assert len(rows) == 2 and all(len(row) <= width for row in rows) and "F0" in rows[0] and "rank 1" in rows[1]
    assert ("W" in rows[0]) == (name == "zb-h1") and "bubble" in out

    assert main(["inspect", str(path), "--timeline", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = evaluate(plan.graph, plan.candidate, Cluster.from_dict(plan.document.cluster.description), plan.document.optimizer)
    rest = document["tail_seconds"] + document["optimizer_seconds"]
    last = document["ranks"][found.bottleneck]["end_seconds"]
    assert document["step_seconds"] == found.step_seconds == pytest.approx(last + rest), "as `plan` prints it"
    assert f"The whole step takes {seconds(found.step_seconds)}: stage {found.bottleneck}, which ends last" in out
    for rank, stage, actions in zip(document["ranks"], found.stages, schedule_of(Pipeline(2, 1, name), micro).ranks, strict=True):
        assert [word for word, _, _ in rank["actions"]] == list(map(str, actions))
        assert rank["busy_seconds"] == pytest.approx(stage.busy_seconds)
        assert rank["end_seconds"] == pytest.approx(stage.busy_seconds + stage.bubble_seconds)
        assert rank["bubble_share"] == pytest.approx(1 - rank["busy_seconds"] / document["makespan_seconds"])
        ends = [end for _, _, end in rank["actions"]]
        starts = [start for _, start, _ in rank["actions"]]
        assert ends == sorted(ends) and all(end <= start + 1e-12 for end, start in zip(ends, starts[1:], strict=False))


def test_a_plan_without_its_cluster_has_no_times(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = made(Pipeline(2), 2, described=False)
    assert main(["inspect", str(path), "--timeline"]) == 2
    said = capsys.readouterr().err
    assert "does not describe its cluster" in said and said.count("\n") == 1
