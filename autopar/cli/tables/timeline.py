"""For `inspect --timeline`: the pipeline's schedule with the predicted times, drawn in the terminal."""

from __future__ import annotations

from shutil import get_terminal_size

from autopar.cli.console import Console, percent, seconds
from autopar.cli.evaluation import cluster_of
from autopar.errors import PlanError
from autopar.ir.plan_file.plan_file import Plan
from autopar.schedules.draw import LEGEND, draw


def timeline(plan: Plan, console: Console) -> None:
    """One line for each pipeline rank: forwards and backwards, without the optimizer and the last gradient reductions on the data
    axis. PlanError where the file does not describe the cluster."""
    from autopar.cost_models.breakdown.pipeline_timeline import pipeline_timeline
    from autopar.cost_models.step.evaluate import evaluate

    cluster = cluster_of(plan)
    if cluster is None:
        raise PlanError("the plan does not describe its cluster, so that there are no times: plan again with --cluster")
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
