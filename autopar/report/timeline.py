"""The timeline of a step: compact, as the page has it (spans of each stage, and each distinct pass of a micro-batch once), and in
the Trace Event Format, which Perfetto and chrome://tracing open: stages as processes, streams as threads.

Names are those of a measured step (`parallel.report().save_trace`): ``forward Block``, ``backward Block``, ``optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from autopar.cost_models.breakdown.step_timeline import StageSpan, StepTimeline
from autopar.cost_models.step.streams import COMPUTE, EXPOSED, STALL, TRANSFER, StreamSpan
from autopar.errors import FileError
from autopar.files import read_bytes
from autopar.ir.plan_file.plan_file import Plan
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from autopar.runtime.report.trace_event import MAIN, complete_event, metadata_event

PASSES, DATA = 0, 2
THREADS = {PASSES: "passes of micro-batches", MAIN: "main stream", DATA: "data axis (overlapped communication)"}
MOST_EVENTS = 200_000
"""With more, only the first and the last micro-batch of each stage have events of their streams: a viewer has to load the
file."""

Event = dict[str, Any]


def chrome_trace(plan: Plan, timeline: StepTimeline) -> dict[str, Any]:
    """Return the trace as JSON. One rank of each pipeline stage stands for all of its stage: they do the same."""
    inside = sum(len(each) for stage in timeline.stages for each in stage.passes)
    whole = inside <= MOST_EVENTS
    events = [event for stage in range(len(timeline.stages)) for event in _stage_events(plan, timeline, stage, whole)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step_seconds": timeline.evaluation.step_seconds,
            "ranks": f"one rank of each of {len(timeline.stages)} pipeline stages, of {plan.candidate.devices} ranks",
            "streams": "of all micro-batches" if whole else "of the first and the last micro-batch of each stage",
            **({} if timeline.flushed else {"batch": "one of many: the next one begins before it ends"}),
        },
    }


_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_MOST_BYTES = 256 * 2**20


class _MeasuredEvent(msgspec.Struct, omit_defaults=True):
    ph: Literal["X", "M"]
    name: Annotated[str, msgspec.Meta(max_length=300)]
    pid: _Whole
    tid: _Whole
    args: dict[str, Any]
    ts: _Number | None = None
    dur: _Number | None = None


class _MeasuredTrace(msgspec.Struct):
    traceEvents: list[_MeasuredEvent]  # noqa: N815  the format's name


def measured_events(path: str | Path) -> list[Event]:
    """Return the events that ``parallel.report().save_trace`` wrote, whose processes are others than those of a plan: both steps
    begin at 0. FileError where the file is none."""
    try:
        trace = msgspec.json.decode(read_bytes(path, FileError, "the measured trace", _MOST_BYTES), type=_MeasuredTrace)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        remedy = "name a file that parallel.report().save_trace(...) wrote"
        raise FileError(f"{path} is no measured trace ({fault}): {remedy}") from None
    events: list[Event] = msgspec.to_builtins(trace.traceEvents)
    return events


def _stage_events(plan: Plan, timeline: StepTimeline, stage: int, whole: bool) -> Iterator[Event]:
    ranks = plan.candidate.mesh.size
    first = stage * ranks
    name = f"stage {stage}: rank {first}" + (f" (as ranks {first} to {first + ranks - 1})" if ranks > 1 else "")
    yield metadata_event("process_name", stage, PASSES, name=name)
    yield metadata_event("process_sort_index", stage, PASSES, sort_index=2 * stage)
    for thread, words in THREADS.items():
        yield metadata_event("thread_name", stage, thread, name=words)
    own = timeline.stages[stage]
    last = max((span.micro_batch for span in own.spans), default=0)
    for span, inside in zip(own.spans, own.passes, strict=True):
        yield _action_event(stage, span)
        if span.action not in ACTIONS:
            yield _action_event(stage, span) | {"tid": MAIN}
        if whole or span.micro_batch in (0, last):
            yield from (_stream_event(plan, timeline, stage, span, each) for each in inside)


ACTIONS = (FORWARD, BACKWARD, "I", "W")


def _action_event(stage: int, span: StageSpan) -> Event:
    args = {"chunk": span.chunk, "micro_batch": span.micro_batch} if span.micro_batch >= 0 else {}
    return complete_event(ACTION_WORDS[span.action], stage, PASSES, span.start_seconds, span.end_seconds, **args)


def _stream_event(plan: Plan, timeline: StepTimeline, stage: int, span: StageSpan, each: StreamSpan) -> Event:
    calls = timeline.chunks[span.chunk].owned.calls
    call = plan.graph.calls[calls[each.call]] if each.call >= 0 else None
    block = call.block if call is not None else ""
    name = {
        COMPUTE: f"{ACTION_WORDS[span.action]} {block}",
        EXPOSED: f"exposed communication over {' and '.join(sorted(each.links))}",
        STALL: "wait for the data axis",
        TRANSFER: each.what,
    }[each.kind]
    about = {"micro_batch": span.micro_batch} | ({"module": call.prefix or call.block} if call is not None else {})
    thread = DATA if each.kind == TRANSFER else MAIN
    return complete_event(name.strip(), stage, thread, each.start_seconds, each.end_seconds, **about)


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
