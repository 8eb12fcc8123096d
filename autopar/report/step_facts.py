"""Where each second of a step goes, by stage: predicted, and measured beside it."""

from __future__ import annotations

from typing import Any

from autopar.cost_models.breakdown.step_timeline import StepTimeline
from autopar.cost_models.step.call_trace import HOST_LINK, LAUNCHES
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan_file.plan_file import Plan
from autopar.report.predicted_step import predicted_step, stage_parts
from autopar.schedules.pipeline_schedule import chunks_of_stages

COMPUTE, DATA, BUBBLE, OPTIMIZER = "compute", "waits for the data axis", "pipeline bubble", "optimizer"
MEASURED_PARTS = {
    "compute_seconds": COMPUTE,
    "model_wait_seconds": "exposed communication",
    "data_wait_seconds": DATA,
    "pipeline_wait_seconds": BUBBLE,
    "optimizer_seconds": OPTIMIZER,
}
"""The parts of a stage of a measured step, which does not divide the waits by axis."""


def step_facts(plan: Plan, timeline: StepTimeline) -> dict[str, Any]:
    """Return the parts of the step of each stage, which add up to the end of the stage."""
    evaluation = timeline.evaluation
    rows = [_parts(number, plan, timeline) for number in range(len(evaluation.stages))]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name, 0.0) > 0 for row in rows)]
    return {
        "step_seconds": evaluation.step_seconds,
        "bottleneck": evaluation.bottleneck,
        "parts": [{"name": name, "seconds": [row.get(name, 0.0) for row in rows]} for name in names],
        "ends": [stage.end_seconds for stage in evaluation.stages],
        "shared_cores": timeline.shared_cores,
        "axes": [
            {"axis": axis, "seconds": seconds, "exposed": dict(evaluation.exposed_axis_seconds)[axis]}
            for axis, seconds in evaluation.axis_seconds
            if seconds
        ],
    }


def _parts(number: int, plan: Plan, timeline: StepTimeline) -> dict[str, float]:
    """Return the parts of one stage: those of `report.predicted_step`, with exposed communication by mesh axis, and the
    accumulation of gradients in the compute, where the evaluator has it."""
    stage, traces = timeline.evaluation.stages[number], timeline.traces[number]
    row = stage_parts(number, plan, stage, traces)
    calls = [traces[plan.graph.calls[index].block] for index in stage.calls]
    micro_batches = plan.candidate.micro_batches
    chunks = [timeline.chunks[chunk] for chunk in chunks_of_stages(plan.candidate.pipeline)[number]]
    accumulated = micro_batches * sum(each.accumulate_seconds for chunk in chunks for each in chunk.communication)
    accumulated = min(accumulated, row["data_wait_seconds"])
    out = {COMPUTE: row["compute_seconds"] + accumulated}
    for axis, name in enumerate(plan.candidate.mesh.names):
        if seconds := micro_batches * sum(call.exposed_axis_seconds[axis] for call in calls):
            out[f"exposed on {name}" + (" (losses, counts)" if name == DATA_AXIS else "")] = seconds
    for link, name in ((HOST_LINK, "copies to host memory"), (LAUNCHES, "waits for the host's launches")):
        if seconds := micro_batches * sum(call.stall_seconds(link) for call in calls):
            out[name] = seconds
    out[DATA], out[BUBBLE], out[OPTIMIZER] = (row[f"{part}_seconds"] for part in ("data_wait", "pipeline_wait", "optimizer"))
    out[DATA] -= accumulated
    return out


def measured_facts(plan: Plan, measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the measured step beside the predicted one (`runtime.report.compare`); None where nothing was measured."""
    if measured is None:
        return None
    from autopar.runtime.report.compare import comparison

    result = comparison(measured, predicted_step(plan, measured["compiled"]))
    return {
        "device": measured["device"],
        "steps": measured["steps"],
        "step_seconds": measured["step_seconds"],
        "parts": [
            {"name": name, "seconds": [stage[key] for stage in measured["stages"]]}
            for key, name in MEASURED_PARTS.items()
            if any(stage[key] for stage in measured["stages"])
        ],
        "summary": result["summary"],
        "tables": [{"title": title, "header": header, "rows": rows} for title, header, rows in result["tables"]],
        "advice": result["advice"],
    }
