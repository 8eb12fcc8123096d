"""``autopar explain`` from a plan's file alone: its document, its baselines, formulas, and a question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.handwritten_blocks import gpt2_graph

from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan_file.codec import graph_fingerprint
from autopar.ir.plan_file.plan_file import Plan
from autopar.solve.fixed.baselines import baselines
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    graph = gpt2_graph(layers=2, hidden=128, heads=4, vocabulary=512, seq=64, batch=16)
    graph = replace(graph, fingerprint=graph_fingerprint(graph))
    cluster, options = Cluster.parse("dgx-h100:1"), SearchOptions(force={"dp": 4, "tp": 2})
    recipes = baselines(graph, cluster, options)
    plan = plan_of_result(graph, cluster, search(graph, cluster, options), recipes, optimizer=options.optimizer)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return plan, path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["explain", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_agrees_with_the_plan(planned: tuple[Plan, Path], capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = planned
    found = said(capsys, str(path), "--json")
    step = plan.document.predicted.step_seconds
    assert found["step_seconds"] == pytest.approx(step, rel=1e-9)
    assert set(found["baselines"]) == {"ddp", "fsdp", "fsdp_tp", "megatron"} == set(plan.document.baselines)
    for name, each in plan.document.baselines.items():
        assert each is not None and found["baselines"][name]["step_seconds"] == pytest.approx(each.step_seconds, rel=1e-9)
    assert len(found["ops"]) == 10 and found["collectives"] and found["reasons"]


def test_tables_for_people(planned: tuple[Plan, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(planned[1])]) == 0
    text = capsys.readouterr().out
    for words in ("The costliest operations", "The costliest collectives", "Baselines", "Megatron", "FSDP"):
        assert words in text


def test_formulas(planned: tuple[Plan, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(planned[1]), "--formulas", "--json")
    assert all("=" in line["text"] and line["seconds"] > 0 for each in found for line in each["formulas"])
    assert main(["explain", str(planned[1]), "--formulas"]) == 0
    assert "compute.product = 2*count*m*n*k" in capsys.readouterr().out


def test_a_question(planned: tuple[Plan, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(planned[1]), "--what-if", "dp=8", "--json")
    assert found["after"]["mesh"] == "dp=8" and found["before"]["step_seconds"] != found["after"]["step_seconds"]
