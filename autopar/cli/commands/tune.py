"""``torchrun ... -m autopar tune``: runs the plan and those nearest to it in turn, some steps each, and writes the fastest."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autopar.cli.commands.plan import options_of, precision_asked
from autopar.cli.console import Console, seconds
from autopar.errors import ClusterError
from autopar.files import check_target
from autopar.ir.describe import describe

if TYPE_CHECKING:
    from autopar.capture.models import LoadedModel
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.ir.plan_file.plan_file import Plan
    from autopar.tune import RacedPlan


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Plans on rank 0, races the plans on all ranks, and writes the fastest one. Every rank runs this."""
    from autopar.capture.models import load_model
    from autopar.planning import cache_folder, cluster_named
    from autopar.tune import fastest, race

    if "WORLD_SIZE" not in os.environ:
        raise ClusterError("tune runs plans on their devices: start it with torchrun --nproc-per-node N -m autopar tune ...")
    rank = int(os.environ["RANK"])
    options_of(arguments)
    check_target(arguments.output)
    cluster = cluster_named(arguments.cluster, cache_folder(), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)  # one model and one batch on all ranks
    loaded = load_model(arguments.model, arguments.batch, arguments.seq, device="cpu")
    plans = _agreed_plans(arguments, loaded, cluster, console)
    raced = race(loaded.model, plans, cluster, loaded.example_inputs, arguments.laps, arguments.steps)
    best = fastest(raced)
    if rank == 0:
        best.plan.save(arguments.output)
        _report(raced, best, arguments.output, console)
    # a thread of gloo that lets go of its last tensors while the interpreter ends aborts now and then
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _agreed_plans(arguments: argparse.Namespace, loaded: LoadedModel, cluster: Cluster, console: Console) -> list[Plan]:
    """The plans of rank 0's search, on all ranks."""
    from autopar.ir.plan_file.plan_file import decode_plan
    from autopar.planning import nearest_plans
    from autopar.runtime.comm.heartbeat import join
    from autopar.variants.maker import on_first_rank

    def texts() -> list[str]:
        console.progress(f"planning {loaded.name}")
        options = replace(
            options_of(arguments), precision=precision_asked(arguments, loaded.model), name=loaded.name, processes=1
        )
        found = nearest_plans(loaded.model, cluster, loaded.example_inputs, options, arguments.candidates)
        console.progress(f"running {len(found)} plans in turn, {arguments.laps} times {arguments.steps} steps each")
        return [each.to_json() for each in found]

    join(cluster.size, {cluster.name: cluster.size}, lambda rank: f"rank {rank}")
    return [decode_plan(text) for text in on_first_rank(texts)]


def _report(raced: list[RacedPlan], best: RacedPlan, path: str, console: Console) -> None:
    """The table of the race, or its JSON document."""
    rows, data = [], []
    for each in raced:
        plan, predicted = each.plan, each.plan.document.predicted
        name = describe(plan.graph, plan.candidate)
        measured = each.median_seconds if each.step_seconds else None
        rows.append((name, seconds(predicted.step_seconds), each.error or seconds(measured), "kept" if each is best else ""))
        data.append(
            {"plan": name, "predicted_step_seconds": predicted.step_seconds, "median_step_seconds": measured,
             "step_seconds": list(each.step_seconds), "error": each.error, "kept": each is best}
        )  # fmt: skip
    console.table("Plans in turn", ("plan", "predicted step", "measured (median)", ""), rows)
    console.text(f"written to {path}: parallelize(..., plan={path!r}) runs it")
    console.document({"plans": data, "written": path})
