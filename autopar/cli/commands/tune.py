"""``torchrun ... -m autopar tune``: runs the plan and those nearest to it in turn, some steps each, writes the fastest, and what
their steps say of the cluster into its file."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autopar.cli.commands.plan import options_of, precision_asked
from autopar.cli.console import Console, seconds
from autopar.cli.output import end_process
from autopar.errors import AutoparError, ClusterError
from autopar.files import check_target
from autopar.ir.describe import describe

if TYPE_CHECKING:
    from autopar.capture.models import LoadedModel
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.ir.plan_file.plan_file import Plan
    from autopar.tune import Lesson, RacedPlan

def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plans on rank 0, races the plans on all ranks, and writes the fastest one. Every rank runs this."""
    from autopar.runtime.comm.heartbeat import join

    if "WORLD_SIZE" not in os.environ:
        raise ClusterError("tune runs plans on their devices: start it with torchrun --nproc-per-node N -m autopar tune ...")
    launched = int(os.environ["WORLD_SIZE"])
    join(launched, {"ranks": launched}, lambda rank: f"rank {rank}")
    try:
        _tune(arguments, console)
    except AutoparError as error:  # all ranks have one: rank 0 says it
        if os.environ["RANK"] == "0":
            raise
        end_process(error.exit_status)
    end_process(0)


def _tune(arguments: argparse.Namespace, console: Console) -> None:
    from autopar.runtime.comm.agreement import refused_together
    from autopar.tune import cluster_file, fastest, keep, learn, race

    rank, path = int(os.environ["RANK"]), cluster_file(arguments.cluster, arguments.output)
    together = partial(refused_together, lambda rank: f"rank {rank}", problem=AutoparError)
    with together():
        loaded, cluster = _prepare(arguments, path if rank == 0 else None)
    with together():
        plans = _agreed_plans(arguments, loaded, cluster, console)
    with together():
        raced = race(loaded.model, plans, cluster, loaded.example_inputs, arguments.laps, arguments.steps)
    if rank == 0:
        best, lesson = fastest(raced), learn(raced)
        best.plan.save(arguments.output)
        how = f"autopar tune, {date.today().isoformat()}, {len(lesson.before)} plans of {' '.join(loaded.name.split())}"
        keep(lesson, arguments.cluster, cluster, path, how)
        _report(raced, best, lesson, arguments.output, path, console)


def _prepare(arguments: argparse.Namespace, path: Path | None) -> tuple[LoadedModel, Cluster]:
    """The model and the cluster, the same on all ranks; `path`: what this rank will write of the cluster."""
    from autopar.capture.models import load_model
    from autopar.plan_inputs import cache_folder, cluster_named
    from autopar.runtime.comm.heartbeat import join

    options_of(arguments)
    if path is not None:
        check_target(arguments.output)
        check_target(path)
    launched = int(os.environ["WORLD_SIZE"])
    cluster = cluster_named(arguments.cluster, cache_folder(), launched)
    join(cluster.size, {cluster.name: cluster.size}, lambda rank: f"rank {rank}")
    torch.manual_seed(0)  # one model and one batch on all ranks
    return load_model(arguments.model, arguments.batch, arguments.seq, device="cpu"), cluster


def _agreed_plans(arguments: argparse.Namespace, loaded: LoadedModel, cluster: Cluster, console: Console) -> list[Plan]:
    """The plans of rank 0's search, on all ranks."""
    from autopar.ir.plan_file.plan_file import decode_plan
    from autopar.planning import nearest_plans
    from autopar.runtime.comm.agreement import on_first_rank

    def texts() -> list[str]:
        console.progress(f"planning {loaded.name}")
        options = replace(
            options_of(arguments), precision=precision_asked(arguments, loaded.model), name=loaded.name, processes=1
        )
        found = nearest_plans(loaded.model, cluster, loaded.example_inputs, options, arguments.candidates)
        console.progress(f"running {len(found)} plans in turn, {arguments.laps} times {arguments.steps} steps each")
        return [each.to_json() for each in found]

    return [decode_plan(text) for text in on_first_rank(texts)]


def _report(raced: list[RacedPlan], best: RacedPlan, lesson: Lesson, path: str, cluster: Path, console: Console) -> None:
    """The table of the race, or its JSON document."""
    rows, data = [], []
    for each in raced:
        plan, predicted = each.plan, each.plan.document.predicted
        name = describe(plan.graph, plan.candidate)
        measured, least = (each.median_seconds, each.least_seconds) if each.step_seconds else (None, None)
        rows.append((name, seconds(predicted.step_seconds), each.error or seconds(measured), "kept" if each is best else ""))
        data.append(
            {"plan": name, "predicted_step_seconds": predicted.step_seconds, "median_step_seconds": measured,
             "least_step_seconds": least, "step_seconds": list(each.step_seconds), "error": each.error, "kept": each is best}
        )  # fmt: skip
    console.table("Plans in turn", ("plan", "predicted step", "measured (median)", ""), rows)
    console.text(f"written to {path}: parallelize(..., plan={path!r}) runs it")
    console.text(
        f"learnt: the devices reach {lesson.rates.device:.2f} of their rates, the links {lesson.rates.network:.2f} of their "
        f"bandwidth; {lesson}. Written to {cluster}: plan with --cluster {cluster}"
    )
    learnt = {**asdict(lesson.rates), "before": lesson.before, "after": lesson.after}
    console.document({"plans": data, "written": path, "learnt": learnt, "cluster": str(cluster)})
