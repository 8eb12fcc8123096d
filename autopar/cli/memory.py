"""For `inspect --memory`: what a device of each pipeline stage holds when most is there, and at which operation that is."""

from __future__ import annotations

from typing import Any

from autopar.cli.output import Output, size
from autopar.ir.planfile import Plan

WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations of the micro-batches in flight",
    "gathered": "gathered weights",
    "temporaries": "temporaries of the operation",
    "collectives": "collective buffers",
    "buffers": "buffers of the model",
    "inputs": "the batch",
    "slack": "allocator slack",
    "base": "framework base",
}


def memory(plan: Plan, output: Output) -> None:
    """Prices the plan again, since the file tells the fullest stage only; without a description of the cluster, the file's."""
    predicted = plan.document.predicted
    stages = stages_of(plan)
    tables = [each["memory"] for each in stages] or [predicted.memory]
    shown = [kind for kind in (*WORDS, *predicted.memory) if any(kind in table for table in tables)]
    rows = [(WORDS.get(kind, kind), *(size(table.get(kind, 0)) for table in tables)) for kind in dict.fromkeys(shown)]
    peaks = [each["peak_bytes"] for each in stages] or [predicted.peak_memory_bytes]
    heads = [f"stage {number}" for number in range(len(tables))] if len(tables) > 1 else ["bytes"]
    output.table("Memory of one device at its peak", ("kind", *heads), [*rows, ("peak", *map(size, peaks))])
    for number, each in enumerate(stages):
        of = f" of stage {number}" if len(stages) > 1 else ""
        output.text(f"the peak{of} is in the {each['place']}")
    capacity = plan.document.cluster.description.get("device", {}).get("memory_bytes")
    if capacity:
        output.text(f"a device has {size(capacity)}")
    document = {"peak_memory_bytes": predicted.peak_memory_bytes, "memory": predicted.memory}
    output.document({**document, "memory_bytes": capacity, "stages": stages})


def stages_of(plan: Plan) -> list[dict[str, Any]]:
    """What each stage holds at its peak; nothing where the plan does not describe its cluster."""
    from autopar.cost_models.evaluate import evaluate
    from autopar.cost_models.hardware import Cluster

    description = plan.document.cluster.description
    if not description:
        return []
    found = evaluate(plan.graph, plan.candidate, Cluster.from_dict(description), plan.document.optimizer)
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
        for stage, each in zip(found.stages, found.stage_memory, strict=True)
    ]
