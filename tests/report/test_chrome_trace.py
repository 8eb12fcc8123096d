"""The trace: its events fill the step, in the Trace Event Format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.plan_file import Plan
from autopar.report import timeline as module
from autopar.report.page import plan_timeline
from autopar.report.timeline import DATA, PASSES, chrome_trace
from autopar.runtime.report.trace_event import MAIN

PRECISION = 2e-3
"""Microseconds: the ends of events are rounded to a nanosecond each."""


def events_of(plan: Plan) -> tuple[dict[tuple[int, int], list[dict[str, Any]]], Any]:
    """Complete events by (process, thread), and the timeline."""
    _, timeline = plan_timeline(plan)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in chrome_trace(plan, timeline)["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"]
            threads[event["pid"], event["tid"]].append(event)
    return threads, timeline


@pytest.mark.parametrize("name", ["", "1f1b", "gpipe", "zb-h1"])
def test_events_add_up_to_the_step(name: str, one_stage: Plan, pipelined: Callable[[Pipeline, int], Plan]) -> None:
    plan = pipelined(Pipeline(2, 1, name), 4) if name else one_stage
    threads, timeline = events_of(plan)
    for stage, time in enumerate(timeline.evaluation.stages):
        passes = sorted(threads[stage, PASSES], key=lambda event: event["ts"])
        assert sum(event["dur"] for event in passes) == pytest.approx(
            1e6 * (time.end_seconds - time.bubble_seconds), abs=PRECISION * len(passes)
        )
        assert passes[-1]["ts"] + passes[-1]["dur"] == pytest.approx(1e6 * time.end_seconds, abs=PRECISION)
        for before, after in zip(passes, passes[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + PRECISION
    last = max(event["ts"] + event["dur"] for each in threads.values() for event in each)
    assert last == pytest.approx(1e6 * timeline.evaluation.step_seconds, abs=PRECISION)


def test_streams_fill_the_passes_of_one_stage(one_stage: Plan) -> None:
    """The main stream does something all the time, one thing at a time; transfers of the data axis follow each other."""
    threads, timeline = events_of(one_stage)
    evaluation = timeline.evaluation
    main = sorted(threads[0, MAIN], key=lambda event: event["ts"])
    assert sum(event["dur"] for event in main) == pytest.approx(1e6 * evaluation.step_seconds, abs=PRECISION)
    for thread in (main, sorted(threads[0, DATA], key=lambda event: event["ts"])):
        assert thread
        for before, after in zip(thread, thread[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + PRECISION
    names = {event["name"] for event in main}
    assert any(name.startswith("forward GPT2Block") for name in names) and any(
        name.startswith("backward GPT2Block") for name in names
    )


def test_large_traces_have_the_streams_of_the_first_and_last_micro_batch(
    pipelined: Callable[[Pipeline, int], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pipelined(Pipeline(2, 1, "1f1b"), 4)
    monkeypatch.setattr(module, "MOST_EVENTS", 10)
    _, timeline = plan_timeline(plan)
    trace = chrome_trace(plan, timeline)
    inside = [
        each for each in trace["traceEvents"] if each["ph"] == "X" and "micro_batch" in each["args"] and each["tid"] != PASSES
    ]
    assert {each["args"]["micro_batch"] for each in inside} == {0, 3} and "first and the last" in trace["otherData"]["streams"]
