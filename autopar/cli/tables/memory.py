"""For `inspect --memory`: the peak memory of a device of each pipeline stage, by kind, and the operation at the peak."""

from __future__ import annotations

from typing import Any

from autopar.cli.console import Console, percent, size
from autopar.cli.evaluation import evaluation_of
from autopar.ir.plan_file.plan_file import Plan

KIND_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations of the micro-batches in flight",
    "gathered": "all-gathered parameters",
    "temporaries": "temporaries and workspace of the operation",
    "collectives": "communication buffers",
    "buffers": "buffers of the model",
    "inputs": "inputs of the batch",
    "slack": "allocator slack",
    "base": "framework base",
}


def memory_table(plan: Plan, console: Console) -> None:
    """Every pipeline stage, by the evaluator; where the file does not describe its cluster, the fullest one as in the file."""
    predicted = plan.document.predicted
    stages = stage_peaks(plan)
    tables = [each["memory"] for each in stages] or [predicted.memory]
    shown = [kind for kind in (*KIND_NAMES, *predicted.memory) if any(kind in table for table in tables)]
    rows = [(KIND_NAMES.get(kind, kind), *(size(table.get(kind, 0)) for table in tables)) for kind in dict.fromkeys(shown)]
    peaks = [each["peak_bytes"] for each in stages] or [predicted.peak_memory_bytes]
    heads = [f"stage {number}" for number in range(len(tables))] if len(tables) > 1 else ["bytes"]
    console.table("Peak memory of one device", ("kind", *heads), [*rows, ("peak", *map(size, peaks))])
    for number, each in enumerate(stages):
        of = f" of stage {number}" if len(stages) > 1 else ""
        console.text(f"the peak{of} is in the {each['place']}")
    capacity = plan.document.cluster.description.get("device", {}).get("memory_bytes")
    if capacity:
        margin = plan.document.cluster.description["device"].get("memory_margin", 0.0)
        free = f", of which a margin of {percent(margin)} stays free" if margin else ""
        console.text(f"a device has {size(capacity)}{free}")
    document = {"peak_memory_bytes": predicted.peak_memory_bytes, "memory": predicted.memory}
    console.document({**document, "memory_bytes": capacity, "stages": stages})


def stage_peaks(plan: Plan) -> list[dict[str, Any]]:
    """The peak of each pipeline stage as rows of JSON; empty where the plan does not describe its cluster."""
    evaluation = evaluation_of(plan)
    if evaluation is None:
        return []
    return [
        {
            "calls": list(stage.calls),
            "peak_bytes": each.peak_bytes,
            "memory": each.table,
            "place": each.place,
            "phase": each.phase,
            "module": each.prefix,
            "operation": each.node,
            "source": each.source,
        }
        for stage, each in zip(evaluation.stages, evaluation.stage_memory, strict=True)
    ]
