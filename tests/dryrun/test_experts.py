"""Dry runs of mixtures of experts: without data every expert gets equally many copies. The prediction expects uneven ones."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from support.harness.rank_pool import RankPool
from support.models.routed_mlp import RoutedMlp
from support.plans.expert_forms import only
from support.plans.pipeline_plans import with_candidate

import autopar
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.ir.plan import Precision
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import program_text
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

WIDTH, INNER, EXPERTS, BATCH, SEQUENCE = 64, 128, 8, 32, 32


def watched(paths: list[str], rank: int) -> list[dict[str, Any]]:
    """In a process of its own: what dry runs of plans say."""
    from autopar.dryrun.run import dry_run
    from autopar.ir.plan_file.plan_file import load_plan

    logging.disable(logging.WARNING)
    return [asdict(dry_run(load_plan(path), rank)) for path in paths]


def dispatching(plan: Plan) -> Plan:
    """The same with tokens sent to their experts."""
    options = SearchOptions(
        batch=BATCH,
        precision=Precision("float32", "float32"),
        force={"pp": 1, "ep": 4},
        pins={"up": {"ep": "S(0)"}, "moe_experts": {"ep": "S(0)"}},
        registry=only("dispatched"),
    )
    return with_candidate(plan, search(plan.graph, Cluster.parse("local:4"), options).candidate)


def test_prediction_is_what_the_program_holds(tmp_path: Path, ranks: RankPool) -> None:
    batch = {"x": torch.randn(BATCH, SEQUENCE, WIDTH), "labels": torch.randint(0, 8, (BATCH, SEQUENCE))}
    forms = {"dp=4": "C.moe_experts(", "tp=4": "C.moe_experts", "ep=4": "C.moe_experts_start("}
    plans, paths = [], []
    for force, call in forms.items():
        model = RoutedMlp(width=WIDTH, inner=INNER, number=EXPERTS)
        plan = autopar.plan(model, "local:4", example_inputs=batch, force=force)
        plan = dispatching(plan) if force == "ep=4" else plan
        assert call in program_text(plan.graph, plan.candidate), force
        plans.append(plan)
        paths.append(str(tmp_path / f"{force}.json"))
        plan.save(paths[-1])
    for force, plan, found in zip(forms, plans, ranks.run_alone(watched, paths, 1, timeout=300), strict=True):
        evaluation = evaluate(plan.graph, plan.candidate, Cluster.parse("local:4"))
        table = dict(evaluation.memory)
        predicted = evaluation.peak_memory_bytes - table["base"] - table["slack"]
        assert 0.95 * found["peak_bytes"] <= predicted <= 1.25 * found["peak_bytes"], force
        sent = {(each["kind"], each["axis"]): each for each in found["collectives"]}
        if force == "ep=4":
            copies = BATCH // 4 * SEQUENCE * 2
            assert sent["all-to-all", "ep"]["bytes"] >= 4 * copies * WIDTH * 4  # there and back, forward and backward
