"""``autopar dryrun``: runs one rank of the plan on fake tensors: peak memory, live tensors, and collectives. On real ones with
``--measure``: computing time too."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import warnings

from autopar.cli.console import Console, percent, size
from autopar.cli.evaluation import with_plan
from autopar.cli.tables.inspection import stage_peaks
from autopar.ir.plan_file.plan_file import Plan

SHOWN = 15


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Needs neither the cluster nor a GPU nor the model's weights. Blocks run as they are, and are priced so."""
    from autopar.dryrun.run import dry_run
    from autopar.given_plan import priced_as

    if plan.document.cluster.compiled:
        console.progress("the plan's blocks are compiled: they run, and are priced, without compilation here")
        plan = priced_as(plan, compiled=False)
    if arguments.measure:
        return _measure(plan, arguments.rank, console)
    console.progress(f"running rank {arguments.rank} of {plan.candidate.devices} on fake tensors, three steps")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        found = dry_run(plan, arguments.rank)
    memory, peak = _predicted(plan, arguments.rank)
    unseen = memory.get("base", 0) + memory.get("slack", 0)
    expected = peak - unseen
    rows = [(kind, size(value)) for kind, value in found.memory.items()]
    where = " ".join(f"{axis}={at}" for axis, at in found.coordinates)
    console.table(f"Rank {found.rank} ({where}) at the peak", ("kind", "bytes"), [*rows, ("peak", size(found.peak_bytes))])
    console.text(f"the peak is at {found.function} in the {found.module}" + (f"\n  {found.line}" if found.line else ""))
    if found.shown_bytes:
        console.text(f"the allocator would reserve {size(found.reserved_bytes)}, and the device show {size(found.shown_bytes)}")
    if peak:
        console.text(
            f"predicted {size(expected)} ({percent(expected / found.peak_bytes - 1)}), "
            f"beside {size(unseen)} of the framework and the allocator that tensors do not show\n"
        )
    cells = [(each.kind, each.allocated_at, each.count, size(each.bytes)) for each in found.tensors[:SHOWN]]
    console.table("Live tensors at the peak, largest first", ("kind", "created by", "tensors", "bytes"), cells)
    sent = [(each.kind, each.axis, each.count, size(each.bytes)) for each in found.collectives]
    console.table("Collectives of one step", ("collective", "axis", "times", "bytes"), sent)
    document = dataclasses.asdict(found)
    document["coordinates"] = dict(found.coordinates)
    console.document({**document, "predicted_bytes": expected})
    return 0


def _measure(plan: Plan, rank: int, console: Console) -> int:
    """Real kernels: computing time and peak memory of the rank, beside the prediction."""
    from autopar.dryrun.real_kernels import compare_with_plan, measure_rank

    console.progress(f"running rank {rank} of {plan.candidate.devices} on real tensors, seven steps; collectives move nothing")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        found = measure_rank(plan, rank, threads=_threads())
    console.text(f"Rank {rank} on {found.device}, of pipeline stage {found.stage}; what it waits for is left out")
    rows = compare_with_plan(plan, found)
    for title, header, lines in rows["tables"]:
        console.table(title, header, lines)
    document = {"rank": rank, "stage": found.stage, "device": found.device, "measured": found.measured}
    console.document({**document, "peak_bytes": found.peak_bytes, "compute": rows["compute"]})
    return 0


def _threads() -> int:
    """OMP_NUM_THREADS, or one, as under torchrun."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(1024, int(told))) if told.isascii() and told.isdigit() and len(told) < 6 else 1


def _predicted(plan: Plan, rank: int) -> tuple[dict[str, int], int]:
    """Return the prediction for the rank's pipeline stage: bytes by kind at the peak, and their sum."""
    stages = stage_peaks(plan)
    if not stages:
        return plan.document.predicted.memory, plan.document.predicted.peak_memory_bytes or 0
    stage = stages[rank // plan.candidate.mesh.size]
    return stage["memory"], stage["peak_bytes"]
