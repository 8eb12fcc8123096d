"""Among plans that the cost models cannot tell apart: the simplest one, with most memory left.

In the sweeps of ``validate/data/published_train.csv`` two configurations whose predictions are less than 2 % apart are in the
order of the measurements in 61 of 100 pairs (99 pairs), those that are 3 to 5 % apart in 81 of 100, and beyond 10 % in 95 of 100.
(The constants have seen the sweeps, and most pairs are BLOOM's.) So what is less than `SearchOptions.indifference` ahead is no
reason for offloading or partitioning activations, an unusual schedule, or one more mesh axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError
from autopar.ir.describe import describe
from autopar.ir.graph import Graph
from autopar.ir.partition_saved import saving_everything
from autopar.ir.plan import BlockPlan, Candidate
from autopar.solve.fixed.baselines import PricedRecipe
from autopar.solve.fixed.candidate import may_seed
from autopar.solve.ilp.solve_mesh import PricedPlan
from autopar.solve.result import Fastest, PlanResult
from autopar.solve.space.options import SearchOptions

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
