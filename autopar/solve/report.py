"""What the search found, as a plan file: the description and the figures that people compare."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.hardware import Cluster
from autopar.ir import dims
from autopar.ir.describe import parallelism
from autopar.ir.document import Baseline, ClusterInfo, MeshResult, ModelInfo, Predicted, SearchInfo
from autopar.ir.graph import Graph
from autopar.ir.planfile import Plan, make_plan
from autopar.solve.baselines import Priced, baselines
from autopar.solve.ilp import Status
from autopar.solve.search import SearchOptions, SearchResult


def make_report(
    graph: Graph,
    cluster: Cluster,
    found: SearchResult,
    options: SearchOptions,
    *,
    name: str = "",
    source: str = "",
    seq: int | None = None,
    replicated_ops: tuple[str, ...] = (),
) -> Plan:
    """The plan with its predictions. PlanError where the candidate does not fit its graph: that would be a bug of the search."""
    planned = replace(found.graph, batch=graph.batch) if found.graph is not None else graph
    return make_plan(
        planned,
        found.candidate,
        model=ModelInfo(name or graph.name, graph.fingerprint, _parameter_count(graph), source),
        cluster=ClusterInfo(cluster.name, cluster.size, cluster.to_dict()),
        parallelism=parallelism(planned, found.candidate),
        optimizer=options.optimizer,
        seq=seq,
        predicted=_predicted(cluster, found, seq),
        baselines={each.recipe.key: as_baseline(each) for each in baselines(graph, cluster, options)},
        search=_search(found),
        replicated_ops=replicated_ops,
        replicated_share=dict(found.evaluation.redundant_share),
    )


def _parameter_count(graph: Graph) -> int:
    return sum(dims.numel(p.value.shape, 1) for p in graph.parameters().values() if not p.buffer)


def _predicted(cluster: Cluster, found: SearchResult, seq: int | None) -> Predicted:
    evaluation = found.evaluation
    seconds = evaluation.step_seconds
    return Predicted(
        step_seconds=seconds,
        tokens_per_second_per_device=found.candidate.batch * (seq or 1) / seconds / cluster.size,
        tflops_per_device=evaluation.tflops_per_device,
        mfu=evaluation.mfu,
        peak_memory_bytes=int(evaluation.peak_memory_bytes),
        lower_bound_seconds=found.lower_bound_seconds,
        gap=found.gap,
        memory={kind: int(value) for kind, value in evaluation.memory},
        bubble_share=evaluation.bubble_share,
    )


def as_baseline(priced: Priced) -> Baseline:
    """For the file."""
    found = priced.evaluation
    return Baseline(
        found.step_seconds if found else None,
        int(found.peak_memory_bytes) if found else None,
        priced.fits,
        priced.recipe.title,
        priced.words,
        priced.short_bytes,
        priced.problem,
    )


def _search(found: SearchResult) -> SearchInfo:
    meshes = tuple(
        MeshResult(
            mesh=str(each),
            status=str(each.status),
            bound_seconds=each.bound_seconds if each.status is not Status.INFEASIBLE else None,
            step_seconds=each.evaluation.step_seconds if each.evaluation else None,
            peak_memory_bytes=each.evaluation.peak_memory_bytes if each.evaluation else None,
            seconds=each.seconds,
        )
        for each in found.meshes
    )
    return SearchInfo(found.seconds, len(meshes), str(found.status), meshes)
