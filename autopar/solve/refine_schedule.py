"""The schedule synthesized for the pipeline that the search chose: for its real times, in the memory that its stages leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from autopar.cost_models.hardware.allocator import fragmentation
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.block_memory import call_saved_bytes
from autopar.cost_models.step.chunk_costs import chunk_costs
from autopar.cost_models.step.evaluate import Evaluation, evaluate, stage_traces
from autopar.cost_models.step.stage_memory import StageMemory
from autopar.cost_models.step.stage_times import schedule_times
from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.schedules.placement import stage_of_chunks
from autopar.schedules.synthesis.task import MemoryLimits
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.result import PlanResult
from autopar.solve.space.force import SYNTHESIZED

if TYPE_CHECKING:
    from autopar.solve.pipeline.synthesize import Synthesis

FORCED_EFFORT = 12.0
"""The effort for a schedule that the user asked for (see `synthesize`)."""

DEFAULT_EFFORT = 1.0
DEFAULT_ACTIONS = 400
"""The most actions of a schedule that nobody asked for: it is only looked for where there are no more actions than this."""

Progress = Callable[[str], None]


def with_synthesized_schedule(
    cluster: Cluster,
    result: PlanResult,
    optimizer: str,
    *,
    forced: bool = False,
    min_improvement: float = 0.0,
    progress: Progress | None = None,
) -> PlanResult:
    """Return `result` with a synthesized schedule, where that is faster by the evaluator by more than `min_improvement` (share of
    the step), and fits. `forced`: the user wants one, so that it is looked for longer."""
    graph, candidate = result.graph, result.candidate
    pipeline = candidate.pipeline
    actions = 3 * pipeline.stages * pipeline.virtual * candidate.micro_batches
    if pipeline.stages == 1 or pipeline.weight_versions > 1 or (not forced and actions > DEFAULT_ACTIONS):
        return result
    effort, rival = (FORCED_EFFORT, inf) if forced else (DEFAULT_EFFORT, result.evaluation.step_seconds * (1 - min_improvement))
    synthesis = _synthesis(graph, candidate, cluster, result.evaluation, optimizer, effort, rival)
    if synthesis is None:
        return result
    changed = replace(candidate, pipeline=replace(pipeline, schedule=SYNTHESIZED, actions=str(synthesis.schedule)))
    priced = evaluate(graph, changed, cluster, optimizer)
    better = priced.fits and priced.step_seconds < result.evaluation.step_seconds * (1 - min_improvement)
    if progress is not None:
        progress(
            f"schedule: {synthesis.makespan_seconds:.4g} s synthesized, {synthesis.builder_seconds:.4g} s by "
            f"{synthesis.builder}, gap {100 * synthesis.gap:.1f} %: {'taken' if better else 'the named one stays'}"
        )
    # the bound is of named schedules, and this one may beat them all
    return result.with_plan(graph, PricedPlan(changed, priced)) if better else result


def _synthesis(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    evaluation: Evaluation,
    optimizer: str,
    effort: float,
    rival_seconds: float,
) -> Synthesis | None:
    from autopar.solve.pipeline.synthesize import synthesize  # CP-SAT's package imports pandas: 0.4 s

    runs_of = stage_traces(graph, candidate, cluster, split_backward=True)
    chunks = chunk_costs(graph, candidate, cluster, runs_of, optimizer_named(optimizer))
    rank_of = stage_of_chunks(candidate.pipeline)
    saved_bytes = call_saved_bytes(graph, {name: run.memory for name, run in runs_of[0].items()})
    room = MemoryLimits(
        tuple(sum(saved_bytes[index] for index in chunk.owned.calls) for chunk in chunks),
        tuple(_activation_bytes(each, cluster) for each in evaluation.stage_memory),
        tuple(
            sum(runs_of[rank][graph.calls[index].block].weight_gradient_bytes for index in chunk.owned.calls)
            for chunk, rank in zip(chunks, rank_of, strict=True)
        ),
    )
    times = schedule_times(chunks, cluster)
    try:
        return synthesize(
            times.chunks,
            rank_of,
            candidate.micro_batches,
            times.transfer_seconds,
            memory=room,
            split_backward=True,
            blocking=times.blocking,
            effort=effort,
            rival_seconds=rival_seconds,
            name=SYNTHESIZED,
        )
    except Infeasible:
        return None


def _activation_bytes(stage: StageMemory, cluster: Cluster) -> float:
    """Return the bytes that activations in flight may take, beside what else is there at the peak."""
    free = (stage.budget_bytes - stage.peak_bytes) / (1 + fragmentation(cluster.device))
    return stage.table["activations"] + max(0.0, free)
