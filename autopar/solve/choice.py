"""The choice of the plan after a search. Among plans that the cost models cannot tell apart it is the simplest one, with most
memory left; its pipeline gets a schedule synthesized for its real times, in the memory that its stages leave.

In the sweeps of ``validate/data/published_train.csv`` two configurations whose predictions are less than 2 % apart are in the
order of the measurements in 61 of 100 pairs (99 pairs), those that are 3 to 5 % apart in 81 of 100, and beyond 10 % in 95 of 100.
(The constants have seen the sweeps, and most pairs are BLOOM's.) So what is less than `SearchOptions.indifference` ahead is no
reason for offloading or partitioning activations, an unusual schedule, or one more mesh axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from autopar.errors import AutoparError, Infeasible
from autopar.ir.describe import describe
from autopar.ir.graph import Graph
from autopar.ir.partition_saved import saving_everything
from autopar.ir.plan import BlockPlan, Candidate
from autopar.schedules.pipeline_schedule import stage_of_chunks
from autopar.schedules.synthesis.task import MemoryLimits
from autopar.solve.fixed.baselines import PricedRecipe
from autopar.solve.fixed.candidate import may_seed
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.result import Fastest, PlanResult
from autopar.solve.space.force import SYNTHESIZED
from autopar.solve.space.options import SearchOptions

if TYPE_CHECKING:
    from autopar.solve.pipeline.synthesize import Synthesis


_USUAL_SCHEDULES = ("", "1f1b")
_HEAVY_FEATURE = 2
"""Mesh axes that offloading or an unusual schedule count for."""

_MEMORY_STEP = 0.05
"""Shares of the memory that differ by less count as equal."""


def complexity(candidate: Candidate) -> int:
    """Count what may go wrong in a plan or has to be understood: its axes of more than one rank beside the data axis, pipeline,
    interleaved chunks, state groups; offloading, activations in parts and unusual schedules count twice."""
    pipeline = candidate.pipeline
    unusual = pipeline.stages > 1 and (pipeline.schedule not in _USUAL_SCHEDULES or bool(pipeline.actions))
    offloads, parts = any(plan.offload for plan in candidate.blocks), any(plan.partition_saved for plan in candidate.blocks)
    heavy = (offloads, parts, bool(candidate.precision.offload_optimizer), unusual, pipeline.weight_versions > 1)
    light = (
        *(axis.size > 1 for axis in candidate.mesh.axes[1:]),
        pipeline.stages > 1,
        pipeline.virtual > 1,
        candidate.zero_group > 0,
    )
    return _HEAVY_FEATURE * sum(heavy) + sum(light)


def robust_choice(
    graph: Graph, cluster: Cluster, options: SearchOptions, result: PlanResult, recipes: Sequence[PricedRecipe] = ()
) -> PlanResult:
    """Return `result` with the plan that is chosen among those whose predicted step is at most `options.indifference` (relative)
    longer: those of the search, and plain data parallelism (DDP, FSDP) of `recipes` where nothing is forced."""
    most_seconds = result.evaluation.step_seconds * (1 + options.indifference)
    alternatives = [PricedPlan(result.candidate, result.evaluation, result.graph)]
    alternatives += (each.plan for each in result.alternatives if each.plan is not None)
    alternatives += _data_parallel_plans(options, recipes)
    for alternative in tuple(each for each in alternatives if each.evaluation.step_seconds <= most_seconds):
        alternatives += _with_saved_or_recomputed(graph, alternative, cluster, options.optimizer)
    chosen = min((each for each in alternatives if each.evaluation.step_seconds <= most_seconds), key=_rank)
    if chosen.candidate == result.candidate:
        return result
    fastest = Fastest(
        describe(result.graph, result.candidate, result.evaluation.bubble_share or None), result.evaluation.step_seconds
    )
    return result.with_plan(graph, chosen, fastest=fastest)


def _rank(plan: PricedPlan) -> tuple[int, int, float]:
    evaluation = plan.evaluation
    used = evaluation.peak_memory_bytes / max(1, evaluation.memory_capacity_bytes)
    return complexity(plan.candidate), int(used / _MEMORY_STEP), evaluation.step_seconds


def _data_parallel_plans(options: SearchOptions, recipes: Sequence[PricedRecipe]) -> Iterator[PricedPlan]:
    """Data parallelism as people write it, with nothing or all of the layers recomputed."""
    if not may_seed(options):
        return
    for each in recipes:
        fixed = each.configuration
        plain = fixed is not None and fixed.tp == fixed.pp == 1 and fixed.recompute in ("none", "full")
        if plain and each.fits and each.candidate is not None and each.evaluation is not None:
            yield PricedPlan(each.candidate, each.evaluation)


def _with_saved_or_recomputed(graph: Graph, plan: PricedPlan, cluster: Cluster, optimizer: str) -> Iterator[PricedPlan]:
    """Yield the plan with its offloaded and partitioned tensors saved whole, or with their blocks recomputed, where that fits."""
    graph, candidate = plan.graph or graph, plan.candidate
    if not any(block.offload or block.partition_saved for block in candidate.blocks):
        return
    for change in (_save_everything, _recompute_everything):
        blocks = (change(block) if block.offload or block.partition_saved else block for block in candidate.blocks)
        changed = replace(candidate, blocks=tuple(blocks))
        try:
            priced = evaluate(graph, changed, cluster, optimizer)
        except AutoparError:  # it cannot be recomputed
            continue
        if priced.fits:
            yield PricedPlan(changed, priced, graph)


def _save_everything(plan: BlockPlan) -> BlockPlan:
    return replace(plan, offload=(), partition_saved=())


def _recompute_everything(plan: BlockPlan) -> BlockPlan:
    return replace(saving_everything(plan), recompute=True)


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
