"""The timeline of a step, compact: spans of each stage, and each distinct pass of a micro-batch once."""

from __future__ import annotations

from typing import Any

from autopar.cost_models.breakdown.step_timeline import StageSpan, StepTimeline
from autopar.cost_models.step.streams import StreamSpan
from autopar.ir.plan_file.plan_file import Plan
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT

ACTION_WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward of inputs",
    WEIGHT: "backward of weights",
    "reduction": "reduction of gradients",
    "optimizer": "optimizer",
}
_DIGITS = 7
"""Digits of a time, of those before the point of the step: what a screen can show many times over."""


def timeline_facts(plan: Plan, timeline: StepTimeline) -> dict[str, Any]:
    """Return per stage its spans ``[action, chunk, micro-batch, start, end, pass]``, and the passes ``[kind, start, end, call,
    what]`` from the beginning of their span (`call` is a place in the chunk). Times are in units of `unit_seconds`."""
    end = max((stage.end_seconds for stage in timeline.stages), default=0.0)
    unit = (end or 1.0) / 10**_DIGITS
    passes: dict[tuple[Any, ...], int] = {}
    stages = []
    for stage in timeline.stages:
        rows = []
        for span, inside in zip(stage.spans, stage.passes, strict=True):
            place = passes.setdefault(_relative(span, inside, unit), len(passes)) if inside else -1
            rows.append([span.action, span.chunk, span.micro_batch, *_ticks(span.start_seconds, span.end_seconds, unit), place])
        stages.append({"spans": rows, "end": round(stage.end_seconds / unit)})
    pipeline = plan.candidate.pipeline
    calls = [
        [plan.graph.calls[index].prefix or plan.graph.calls[index].block for index in chunk.owned.calls]
        for chunk in timeline.chunks
    ]
    return {
        "unit_seconds": unit,
        "schedule": pipeline.schedule if pipeline.stages > 1 else "",
        "synthesized": bool(pipeline.actions),
        "flushed": timeline.flushed,
        "actions": ACTION_WORDS,
        "calls": calls,
        "stages": stages,
        "passes": [list(map(list, each)) for each in passes],
    }


def _ticks(start: float, end: float, unit: float) -> tuple[int, int]:
    return round(start / unit), round(end / unit)


def _relative(span: StageSpan, inside: tuple[StreamSpan, ...], unit: float) -> tuple[Any, ...]:
    begin = span.start_seconds
    return tuple(
        (each.kind, *_ticks(each.start_seconds - begin, each.end_seconds - begin, unit), each.call, _what(each))
        for each in inside
    )


def _what(span: StreamSpan) -> str:
    return span.what or (f"over {' and '.join(sorted(span.links))}" if span.links else "")
