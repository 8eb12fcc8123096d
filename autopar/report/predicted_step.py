"""A plan's predicted step in the form of a measured one (`runtime.report`): parts, blocks, collectives, memory of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.cost_models.breakdown.cost_breakdown import CollectiveCost, StateCollective, cost_breakdown
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.measured_collectives import STATE_KINDS
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.evaluate import Evaluation, evaluate, stage_traces
from autopar.cost_models.step.stage_devices import stage_clusters
from autopar.cost_models.step.stage_times import StageTime
from autopar.errors import PlanError
from autopar.ir.plan_file.plan_file import Plan

_OUTSIDE = ("base", "slack")
"""Kinds of memory that tensors do not show."""


def described_cluster(plan: Plan) -> Cluster:
    """Return the cluster that a plan describes. PlanError where it has only the name and the size."""
    if not plan.document.cluster.description:
        raise PlanError("the plan does not describe its cluster, so that there are no times: plan again with --cluster")
    return Cluster.from_dict(plan.document.cluster.description)


def predicted_step(plan: Plan, compiled: bool | None = None) -> dict[str, Any]:
    """Return the predicted step as JSON, of blocks as they ran: `compiled` or not (None: as the plan is priced). PlanError where
    the plan does not describe its cluster."""
    candidate, cluster = plan.candidate, described_cluster(plan)
    cluster = with_compilation(cluster, cluster.device.fused if compiled is None else compiled)
    evaluation = evaluate(plan.graph, candidate, cluster, plan.document.optimizer)
    traces_of = stage_traces(plan.graph, candidate, cluster)
    clusters = stage_clusters(cluster, candidate.pipeline.stages)
    peak = sum(each.device.matrix_peak_flops_per_second(candidate.precision.compute) for each in clusters) * candidate.mesh.size
    stages = [stage_parts(number, plan, stage, traces_of[number]) for number, stage in enumerate(evaluation.stages)]
    return {
        "step_seconds": evaluation.step_seconds,
        "devices": candidate.devices,
        "examples": candidate.batch,
        "tokens_per_example": plan.document.batch.seq,
        "model_flops": evaluation.model_flops,
        "peak_flops_per_second": peak,
        "mfu": evaluation.mfu,
        "stages": stages,
        "blocks": [
            row for number, stage in enumerate(evaluation.stages) for row in _blocks(number, plan, stage, traces_of[number])
        ],
        "collectives": [row for number in range(len(evaluation.stages)) for row in _collectives(number, plan, cluster)],
        "memory": list(_memory(evaluation)),
    }


def stage_parts(number: int, plan: Plan, stage: StageTime, traces: Mapping[str, CallTrace]) -> dict[str, Any]:
    """Return a stage, whose parts add up to the step; a stage that ends before the slowest one waits for it."""
    micro_batches = plan.candidate.micro_batches
    calls = [traces[plan.graph.calls[index].block] for index in stage.calls]
    compute, exposed = (
        micro_batches * sum(each.seconds(backward=back, exposed=seen) for each in calls for back in (False, True))
        for seen in (False, True)
    )
    return {
        "stage": number,
        "seconds": stage.end_seconds,
        "compute_seconds": compute,
        "model_wait_seconds": exposed,
        "data_wait_seconds": max(0.0, stage.busy_seconds + stage.tail_seconds - compute - exposed),
        "pipeline_wait_seconds": stage.bubble_seconds,
        "optimizer_seconds": stage.optimizer_seconds,
    }


def _blocks(number: int, plan: Plan, stage: StageTime, traces: Mapping[str, CallTrace]) -> Iterator[dict[str, Any]]:
    calls = [plan.graph.calls[index] for index in stage.calls]
    for block, count in Counter(call.block for call in calls).items():
        first = next(call.prefix for call in calls if call.block == block)
        row: dict[str, Any] = {"stage": number, "block": block, "first": first, "modules": count}
        for kind, back in (("forward", False), ("backward", True)):
            seconds = traces[block].seconds(backward=back, exposed=False)
            row[f"{kind}_seconds"] = plan.candidate.micro_batches * count * seconds
        yield row


def _collectives(number: int, plan: Plan, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the collectives by kind and mesh axis, overlapped or exposed."""
    sums: dict[tuple[str, str], list[float]] = {}
    for cost in cost_breakdown(plan.graph, plan.candidate, cluster, plan.document.optimizer, number).collectives:
        kinds = list(_kinds(cost))
        for kind in kinds:
            entry = sums.setdefault((kind, cost.axis), [0.0, 0.0])
            entry[0] += cost.times
            entry[1] += cost.seconds / len(kinds)
    for (kind, axis), (times, seconds) in sums.items():
        yield {"stage": number, "kind": kind, "axis": axis, "times": times, "seconds": seconds}


def _kinds(cost: CollectiveCost) -> Iterator[str]:
    """Yield the kinds of collectives of one call."""
    kinds = [STATE_KINDS.get(kind, kind) for kind, _, _ in cost.collectives] or list(cost.kinds)
    if not kinds:
        kinds = [cost.origin.name.partition(" ")[0]] if isinstance(cost.origin, StateCollective) else ["inside operations"]
    yield from (kind.replace("_", "-") for kind in kinds)


def _memory(evaluation: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield the memory as the tensors show it: without the framework and the allocator."""
    for number, each in enumerate(evaluation.stage_memory):
        table = each.table
        peak = each.peak_bytes - sum(table.get(kind, 0) for kind in _OUTSIDE)
        kinds = {kind: table.get(kind, 0) for kind in ("parameters", "optimizer", "inputs")}
        yield {"stage": number, "peak_bytes": peak, **kinds, "rest": peak - sum(kinds.values())}
