"""Dry runs of mixtures of experts: without data every expert gets equally many copies. The prediction expects uneven ones."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from support.experts import RoutedMlp
from support.ranks import Ranks

import autopar
from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.ir.plan import Precision
from autopar.ir.planfile import Plan, make_plan
from autopar.passes.pipeline import lower
from autopar.program.source import render
from autopar.solve.search import SearchOptions, search

WIDTH, INNER, EXPERTS, BATCH, SEQUENCE = 64, 128, 8, 32, 32


def watched(paths: list[str], rank: int) -> list[dict[str, Any]]:
    """In a process of its own: what dry runs of plans say."""
    from autopar.dryrun.run import dry_run
    from autopar.ir.planfile import load

    logging.disable(logging.WARNING)
    return [asdict(dry_run(load(path), rank)) for path in paths]


def dispatching(plan: Plan) -> Plan:
    """The same with tokens sent to their experts."""
    options = SearchOptions(
        batch=BATCH,
        precision=Precision("float32", "float32"),
        force={"pp": 1, "ep": 4},
        pins={"up": "S(0)", "moe_experts": "S(0)"},
    )
    found, document = search(plan.graph, Cluster.parse("local:4"), options), plan.document
    return make_plan(
        plan.graph, found.candidate, model=document.model, cluster=document.cluster, parallelism=document.parallelism,
        optimizer=document.optimizer,
    )  # fmt: skip


def test_prediction_is_what_the_program_holds(tmp_path: Path, ranks: Ranks) -> None:
    batch = {"x": torch.randn(BATCH, SEQUENCE, WIDTH), "labels": torch.randint(0, 8, (BATCH, SEQUENCE))}
    forms = {"dp=4": "C.moe_experts(", "tp=4": "C.moe_experts", "ep=4": "C.moe_experts_start("}
    plans, paths = [], []
    for force, call in forms.items():
        model = RoutedMlp(width=WIDTH, inner=INNER, number=EXPERTS)
        plan = autopar.plan(model, "local:4", example_inputs=batch, force=force)
        plan = dispatching(plan) if force == "ep=4" else plan
        assert call in render(lower(plan.graph, plan.candidate)), force
        plans.append(plan)
        paths.append(str(tmp_path / f"{force}.json"))
        plan.save(paths[-1])
    for force, plan, found in zip(forms, plans, ranks.apart(watched, paths, 1, timeout=300), strict=True):
        evaluation = evaluate(plan.graph, plan.candidate, Cluster.parse("local:4"))
        table = dict(evaluation.memory)
        predicted = evaluation.peak_memory_bytes - table["base"] - table["slack"]
        assert 0.95 * found["peak_bytes"] <= predicted <= 1.25 * found["peak_bytes"], force
        sent = {(each["kind"], each["axis"]): each for each in found["collectives"]}
        if force == "ep=4":
            copies = BATCH // 4 * SEQUENCE * 2
            assert sent["all-to-all", "ep"]["bytes"] >= 4 * copies * WIDTH * 4  # there and back, forward and backward
