"""Memory of each stage at the events of a step, by kind, with the budget."""

from __future__ import annotations

from typing import Any

from autopar.cost_models.breakdown.step_timeline import StepTimeline
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.memory_events import KINDS, VARYING, MemoryEvent
from autopar.cost_models.step.stage_memory import StagePeak, stage_peaks
from autopar.ir.plan_file.plan_file import Plan

KIND_WORDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "gathered": "all-gathered parameters",
    "activations": "saved activations",
    "temporaries": "temporaries",
    "collectives": "communication buffers",
    "buffers": "buffers of the model",
    "inputs": "inputs of the batch",
    "slack": "allocator slack",
    "base": "framework and communicators",
}
_PHASES = {
    "forward": "forward of",
    "gather": "weights are gathered for the backward of",
    "backward": "backward of",
    "reduction": "end of the backward of",
}


def memory_facts(plan: Plan, cluster: Cluster, timeline: StepTimeline) -> dict[str, Any]:
    """Return per stage its events (where, bytes by kind) and its peak; they are those of the evaluator. Allocator slack is that
    of the peak in all events."""
    owned = [chunk.owned for chunk in timeline.chunks]
    peaks = stage_peaks(plan.graph, plan.candidate, cluster, timeline.traces, owned)
    stages = [
        {
            "peak": [memory.table[kind] for kind in KINDS],
            "peak_bytes": memory.peak_bytes,
            "place": memory.place,
            "budget_bytes": memory.budget_bytes,
            "capacity_bytes": memory.capacity_bytes,
            **_events(plan, each),
        }
        for memory, each in zip(timeline.evaluation.stage_memory, peaks, strict=True)
    ]
    fullest = timeline.evaluation.stage_memory.index(timeline.evaluation.fullest_stage)
    return {"kinds": [KIND_WORDS[kind] for kind in KINDS], "fullest": fullest, "stages": stages}


def _events(plan: Plan, each: StagePeak) -> dict[str, Any]:
    """Return places and bytes of all events; none for two weight versions, whose second one is in the peak alone."""
    peak = each.peak
    if plan.candidate.pipeline.weight_versions > 1:
        return {"places": [], "events": []}
    fixed = {kind: size for kind, size in peak.table.items() if kind not in VARYING}
    columns = [[round(getattr(event, kind) if kind in VARYING else fixed[kind]) for event in peak.events] for kind in KINDS]
    return {"places": [_place(plan, each, event) for event in peak.events], "events": columns}


def _place(plan: Plan, each: StagePeak, event: MemoryEvent) -> str:
    if event.call < 0:
        return "optimizer step"
    call = plan.graph.calls[each.calls[event.call]]
    return f"{_PHASES[event.phase]} {call.prefix or call.block}"
