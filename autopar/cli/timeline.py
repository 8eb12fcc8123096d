"""For `inspect --timeline`: the pipeline's schedule with the predicted times, drawn in the terminal."""

from __future__ import annotations

from shutil import get_terminal_size

from autopar.cli.output import Output, percent, seconds
from autopar.errors import PlanError
from autopar.ir.planfile import Plan
from autopar.schedules.build import schedule_of
from autopar.schedules.clock import Clock
from autopar.schedules.draw import LEGEND, draw
from autopar.schedules.held import most_held


def timeline(plan: Plan, output: Output) -> None:
    """One row for each pipeline rank. Forwards and backwards only: the optimizer and what waits behind the last backward for the
    data axis is not in it. PlanError where the file does not describe the cluster."""
    from autopar.cost_models.evaluate import stage_runs
    from autopar.cost_models.hardware import Cluster
    from autopar.cost_models.stages import chunk_seconds, chunks
    from autopar.cost_models.state import optimizer_named

    description, candidate = plan.document.cluster.description, plan.candidate
    if not description:
        raise PlanError("the plan does not describe its cluster, so that there are no times: plan again with --cluster")
    cluster, pipeline, many = Cluster.from_dict(description), candidate.pipeline, candidate.micro_batches
    schedule = schedule_of(pipeline, many)
    runs = stage_runs(plan.graph, candidate, cluster)
    made = chunks(plan.graph, candidate, cluster, runs, optimizer_named(plan.document.optimizer))
    times = chunk_seconds(made), [chunk.send_seconds for chunk in made[:-1]], cluster.overlap.sends_block
    clock = Clock.of(schedule)
    spans, ranks = clock.spans(*times), clock.run(*times)
    end = max(rank.end_seconds for rank in ranks)
    share = [1 - rank.busy_seconds / end if end else 0.0 for rank in ranks]
    chunks_of = [sorted({action.chunk for action in actions}) for actions in schedule.ranks]
    held = [most_held(actions) for actions in schedule.ranks]

    label = len(f"rank {len(ranks) - 1} ")
    drawing = draw(spans, max(20, get_terminal_size((100, 24)).columns - label - 2))
    output.text(
        f"{schedule.name}, {many} micro-batches on {len(ranks)} ranks: {seconds(end)}, bubble {percent(sum(share) / len(share))}"
    )
    for rank, line in enumerate(drawing.lines):
        output.text(f"rank {rank} ".ljust(label) + f"|{line}|")
    if drawing.left_out:
        output.text(f"~ the middle is left out, from {seconds(drawing.left_out[0])} to {seconds(drawing.left_out[1])}")
    output.text(LEGEND)
    rows = [
        (rank, " ".join(map(str, chunks_of[rank])), seconds(each.busy_seconds), percent(share[rank]), held[rank])
        for rank, each in enumerate(ranks)
    ]
    output.table("Bubble of each rank", ("rank", "chunks", "busy", "bubble", "micro-batches held (of its chunks)"), rows)
    output.document(
        {
            "schedule": schedule.name,
            "micro_batches": many,
            "makespan_seconds": end,
            "bubble_share": sum(share) / len(share),
            "ranks": [
                {
                    "chunks": chunks_of[rank],
                    "busy_seconds": each.busy_seconds,
                    "end_seconds": each.end_seconds,
                    "bubble_share": share[rank],
                    "held": held[rank],
                    "actions": [[str(span.action), span.start_seconds, span.end_seconds] for span in spans[rank]],
                }
                for rank, each in enumerate(ranks)
            ],
        }
    )
