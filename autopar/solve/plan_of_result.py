"""The way from a result of planning to a plan file: the description and the figures that people compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.tensors.saved_tensors import observed_saves
from autopar.ir import dims
from autopar.ir.describe import parallelism, tokens_of
from autopar.ir.graph import Graph
from autopar.ir.plan_file.document import Baseline, ClusterInfo, FastestInfo, MeshResult, ModelInfo, Predicted, SearchInfo
from autopar.ir.plan_file.plan_file import Plan, assemble_plan
from autopar.schedules.pipeline_schedule import chunks_of_stages
from autopar.solve.fixed.baselines import ExpertPrice, PricedRecipe, memory_word
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.problem.pins import Constraints
from autopar.solve.result import PlanResult


def plan_of_result(
    graph: Graph,
    cluster: Cluster,
    result: PlanResult,
    recipes: Sequence[PricedRecipe],
    *,
    optimizer: str,
    name: str = "",
    source: str = "",
    seq: int | None = None,
    replicated_ops: tuple[str, ...] = (),
    constrained: Constraints | None = None,
) -> Plan:
    """Return the plan with its predictions, beside those of `recipes`. PlanError where the candidate does not fit its graph: that
    would be a bug of the search."""
    planned = replace(result.graph, batch=graph.batch)
    return assemble_plan(
        planned,
        result.candidate,
        model=ModelInfo(name or graph.name, graph.fingerprint, _parameter_count(graph), source),
        cluster=ClusterInfo(cluster.name, cluster.size, cluster.to_dict()),
        parallelism=parallelism(planned, result.candidate),
        optimizer=optimizer,
        stage_chunks=chunks_of_stages(result.candidate.pipeline),
        seq=seq,
        predicted=_predicted(cluster, result),
        baselines={each.recipe.key: as_baseline(each) for each in recipes},
        search=_search(result, constrained or {}),
        replicated_ops=replicated_ops,
        replicated_share=dict(result.evaluation.redundant_share),
        saves=observed_saves(planned, cluster.device.kind),
    )


def _parameter_count(graph: Graph) -> int:
    return sum(dims.numel(p.value.shape, 1) for p in graph.parameters().values() if not p.buffer)


def _predicted(cluster: Cluster, result: PlanResult) -> Predicted:
    evaluation = result.evaluation
    seconds = evaluation.step_seconds
    rate, tokens = result.candidate.batch / seconds, tokens_of(result.graph)
    return Predicted(
        step_seconds=seconds,
        tokens_per_second_per_device=rate * tokens / cluster.size if tokens is not None else None,
        tflops_per_device=evaluation.tflops_per_device,
        mfu=evaluation.mfu,
        peak_memory_bytes=int(evaluation.peak_memory_bytes),
        lower_bound_seconds=result.lower_bound_seconds,
        gap=result.gap,
        memory={kind: int(value) for kind, value in evaluation.memory},
        bubble_share=evaluation.bubble_share,
        memory_capacity_bytes=evaluation.memory_capacity_bytes,
        memory_margin=cluster.device.memory_margin,
        samples_per_second=rate,
    )


def as_baseline(priced: PricedRecipe) -> Baseline:
    """Return the entry of the file: what experts get of the recipe, where that is known, beside what our own programs would."""
    own, expert = priced.evaluation, priced.expert
    shown: PricedRecipe | ExpertPrice = priced if expert is None else expert
    evaluation = shown.evaluation
    return Baseline(
        step_seconds=evaluation.step_seconds if evaluation else None,
        peak_memory_bytes=int(evaluation.peak_memory_bytes) if evaluation else None,
        memory=memory_word(evaluation),
        fits=shown.fits,
        title=priced.recipe.title,
        configuration=priced.description if expert is None else expert.configuration,
        shortfall_bytes=shown.short_bytes,
        problem=shown.problem,
        software=expert.software if expert is not None else "",
        own_step_seconds=own.step_seconds if own is not None and own.fits else None,
        measured=expert.measured if expert is not None else "",
        measured_seconds=expert.measured_seconds if expert is not None else None,
        reason=expert.reason if expert is not None else "",
    )


def _unique_solutions(solutions: Sequence[MeshSolution]) -> list[MeshSolution]:
    """Return every point once: a pipeline that was solved has its schedules, and no entry as a point without one."""
    solved = {replace(each.point, virtual=1, schedule="") for each in solutions if each.point.schedule}
    return [each for each in solutions if each.point.schedule or each.point not in solved]


def _search(result: PlanResult, constrained: Constraints) -> SearchInfo:
    meshes = tuple(
        MeshResult(
            mesh=str(each),
            status=str(each.status),
            bound_seconds=each.bound_seconds if each.status is not Status.INFEASIBLE else None,
            step_seconds=each.plan.evaluation.step_seconds if each.plan else None,
            peak_memory_bytes=each.plan.evaluation.peak_memory_bytes if each.plan else None,
            reason=each.reason,
        )
        for each in _unique_solutions(result.solutions)
    )
    fastest = FastestInfo(result.fastest.plan, result.fastest.step_seconds) if result.fastest is not None else None
    pinned = {name: dict(places) for name, places in constrained.items()}
    return SearchInfo(len(meshes), str(result.status), meshes, fastest, result.cut_short, pinned)
