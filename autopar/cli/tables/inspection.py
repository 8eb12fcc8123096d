"""The tables of `inspect`: `--memory` (the peak of a device of each pipeline stage, by kind, and the operation at the peak),
`--comm` (the gradient exchange of a step by collectives, and by parameter servers) and `--timeline` (the schedule)."""

from __future__ import annotations

import dataclasses
from shutil import get_terminal_size
from typing import Any

from autopar.cli.console import Console, percent, seconds, size
from autopar.cli.evaluation import cluster_of, evaluation_of
from autopar.ir.plan_file.plan_file import Plan
from autopar.schedules.clock import LEGEND, draw

KIND_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations of the micro-batches in flight",
    "gathered": "all-gathered parameters",
    "temporaries": "temporaries and workspace of the operation",
    "collectives": "communication buffers",
    "buffers": "buffers of the model",
    "inputs": "inputs of the batch",
    "slack": "allocator slack",
    "base": "framework base",
}


def memory_table(plan: Plan, console: Console) -> None:
    """Every pipeline stage, by the evaluator; where the file does not describe its cluster, the fullest one as in the file."""
    predicted = plan.document.predicted
    stages = stage_peaks(plan)
    tables = [each["memory"] for each in stages] or [predicted.memory]
    shown = [kind for kind in (*KIND_NAMES, *predicted.memory) if any(kind in table for table in tables)]
    rows = [(KIND_NAMES.get(kind, kind), *(size(table.get(kind, 0)) for table in tables)) for kind in dict.fromkeys(shown)]
    peaks = [each["peak_bytes"] for each in stages] or [predicted.peak_memory_bytes]
    heads = [f"stage {number}" for number in range(len(tables))] if len(tables) > 1 else ["bytes"]
    console.table("Peak memory of one device", ("kind", *heads), [*rows, ("peak", *map(size, peaks))])
    for number, each in enumerate(stages):
        of = f" of stage {number}" if len(stages) > 1 else ""
        console.text(f"the peak{of} is in the {each['place']}")
    capacity = plan.document.cluster.description.get("device", {}).get("memory_bytes")
    if capacity:
        margin = plan.document.cluster.description["device"].get("memory_margin", 0.0)
        free = f", of which a margin of {percent(margin)} stays free" if margin else ""
        console.text(f"a device has {size(capacity)}{free}")
    document = {"peak_memory_bytes": predicted.peak_memory_bytes, "memory": predicted.memory}
    console.document({**document, "memory_bytes": capacity, "stages": stages})


def stage_peaks(plan: Plan) -> list[dict[str, Any]]:
    """The peak of each pipeline stage as rows of JSON; empty where the plan does not describe its cluster."""
    evaluation = evaluation_of(plan)
    if evaluation is None:
        return []
    return [
        {
            "calls": list(stage.calls),
            "peak_bytes": each.peak_bytes,
            "memory": each.table,
            "place": each.place,
            "phase": each.phase,
            "module": each.prefix,
            "operation": each.node,
            "source": each.source,
        }
        for stage, each in zip(evaluation.stages, evaluation.stage_memory, strict=True)
    ]


def gradient_table(plan: Plan, console: Console) -> list[dict[str, Any]]:
    """Prints the table and returns its rows. Empty on one data rank, and where the plan does not describe its cluster."""
    from autopar.cost_models.breakdown.gradient_exchange import gradient_exchanges

    cluster = cluster_of(plan)
    if cluster is None:
        return []
    found = gradient_exchanges(plan.graph, plan.candidate, cluster)
    rows = [(each.method, size(each.bytes), seconds(each.seconds), f"{each.relative:.3g}") for each in found]
    if rows:
        console.table("Gradient exchange without overlap, for comparison", ("method", "bytes", "time", "relative"), rows)
    return [dataclasses.asdict(each) for each in found]


def timeline(plan: Plan, console: Console) -> None:
    """One line for each pipeline rank: forwards and backwards, without the optimizer and the last gradient reductions on the data
    axis. PlanError where the file does not describe the cluster."""
    from autopar.cost_models.breakdown.step_timeline import pipeline_timeline
    from autopar.cost_models.step.evaluate import evaluate
    from autopar.report.predicted_step import described_cluster

    cluster = described_cluster(plan)
    found = pipeline_timeline(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    step = evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer)
    last = step.stages[step.bottleneck]
    ranks, micro_batches = found.ranks, plan.candidate.micro_batches

    margin = len(f"rank {len(ranks) - 1} ")
    drawing = draw([rank.spans for rank in ranks], max(20, get_terminal_size((100, 24)).columns - margin - 2))
    console.text(
        f"{found.schedule}, {micro_batches} micro-batches on {len(ranks)} pipeline ranks: {seconds(found.makespan_seconds)}, "
        f"bubble {percent(found.bubble_share)}"
    )
    console.text(
        f"The whole step takes {seconds(step.step_seconds)}: stage {step.bottleneck}, which ends last, then reduces gradients "
        f"for {seconds(last.tail_seconds)} and updates its weights for {seconds(last.optimizer_seconds)}"
    )
    for number, line in enumerate(drawing.lines):
        console.text(f"rank {number} ".ljust(margin) + f"|{line}|")
    if drawing.left_out:
        console.text(f"~ the middle is left out, from {seconds(drawing.left_out[0])} to {seconds(drawing.left_out[1])}")
    console.text(LEGEND)
    rows = [
        (number, " ".join(map(str, rank.chunks)), seconds(rank.busy_seconds), percent(rank.bubble_share), rank.in_flight)
        for number, rank in enumerate(ranks)
    ]
    console.table("Pipeline ranks", ("rank", "model chunks", "busy", "bubble", "micro-batches in flight (all chunks)"), rows)
    console.document(
        {
            "schedule": found.schedule,
            "micro_batches": micro_batches,
            "makespan_seconds": found.makespan_seconds,
            "tail_seconds": last.tail_seconds,
            "optimizer_seconds": last.optimizer_seconds,
            "step_seconds": step.step_seconds,
            "bubble_share": found.bubble_share,
            "ranks": [
                {
                    "chunks": list(rank.chunks),
                    "busy_seconds": rank.busy_seconds,
                    "end_seconds": rank.end_seconds,
                    "bubble_share": rank.bubble_share,
                    "in_flight": rank.in_flight,
                    "actions": [[str(span.action), span.start_seconds, span.end_seconds] for span in rank.spans],
                }
                for rank in ranks
            ],
        }
    )
