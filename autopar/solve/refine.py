"""A schedule of its own for the pipeline that the search chose: for its real times, in the memory that its stages leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost_models.evaluate import Evaluation, evaluate, stage_runs
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.memory import call_kept
from autopar.cost_models.stage_memory import StageMemory
from autopar.cost_models.stages import chunk_seconds, chunks
from autopar.cost_models.state import optimizer_named
from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.schedules.build import rank_of_chunks
from autopar.schedules.task import Room
from autopar.solve.search import SearchResult
from autopar.solve.synthesize import Synthesis, synthesize

NAME = "synthesized"
ASKED_SECONDS = 20.0
"""How long a schedule is looked for that the user asked for."""

UNASKED_SECONDS = 1.5
UNASKED_ACTIONS = 400
"""And one that nobody asked for; only where there are no more actions than this."""

_WORTH = 0.005
"""A named schedule stays where the other one is not better by this share of the step."""

Progress = Callable[[str], None]


def refined(
    graph: Graph, cluster: Cluster, found: SearchResult, optimizer: str, *, asked: bool = False, progress: Progress | None = None
) -> SearchResult:
    """`found` with a synthesized schedule, where that is faster by the evaluator's word and fits."""
    graph, candidate = found.graph or graph, found.candidate
    pipeline = candidate.pipeline
    actions = 3 * pipeline.stages * pipeline.virtual * candidate.micro_batches
    if pipeline.stages == 1 or pipeline.weight_versions > 1 or (not asked and actions > UNASKED_ACTIONS):
        return found
    made = _synthesis(graph, candidate, cluster, found.evaluation, optimizer, ASKED_SECONDS if asked else UNASKED_SECONDS)
    if made is None:
        return found
    text = str(made.schedule)
    changed = replace(candidate, pipeline=replace(pipeline, schedule=NAME, actions=text))
    priced = evaluate(graph, changed, cluster, optimizer)
    better = priced.fits and priced.step_seconds < found.evaluation.step_seconds * (1 - _WORTH)
    if progress is not None:
        progress(
            f"schedule: {made.makespan_seconds:.4g} s synthesized, {made.builder_seconds:.4g} s by {made.builder}, "
            f"gap {100 * made.gap:.1f} %: {'taken' if better else 'the named one stays'}"
        )
    if not better:
        return found
    gap = max(0.0, 1 - found.lower_bound_seconds / priced.step_seconds)
    return replace(found, candidate=changed, evaluation=priced, gap=gap)


def _synthesis(
    graph: Graph, candidate: Candidate, cluster: Cluster, evaluation: Evaluation, optimizer: str, seconds: float
) -> Synthesis | None:
    runs_of = stage_runs(graph, candidate, cluster)
    made = chunks(graph, candidate, cluster, runs_of, optimizer_named(optimizer))
    rank_of = rank_of_chunks(candidate.pipeline)
    kept = call_kept(graph, {name: run.memory for name, run in runs_of[0].items()})
    room = Room(
        tuple(sum(kept[index] for index in chunk.owned.calls) for chunk in made),
        tuple(_left(each, cluster) for each in evaluation.stage_memory),
        tuple(
            sum(runs_of[rank][graph.calls[index].block].late_bytes for index in chunk.owned.calls)
            for chunk, rank in zip(made, rank_of, strict=True)
        ),
    )
    try:
        return synthesize(
            chunk_seconds(made),
            rank_of,
            candidate.micro_batches,
            [chunk.send_seconds for chunk in made[:-1]],
            room=room,
            split_backward=True,
            blocking=cluster.overlap.sends_block,
            time_limit_seconds=seconds,
            name=NAME,
        )
    except Infeasible:
        return None


def _left(stage: StageMemory, cluster: Cluster) -> float:
    """What activations in flight may take, beside what else is there at the peak."""
    capacity = stage.capacity_bytes or cluster.device.memory_bytes
    free = (capacity - stage.peak_bytes) / (1 + cluster.device.allocator_slack)
    return stage.table["activations"] + max(0.0, free)
