"""Events of the Trace Event Format, of measured and of simulated steps alike (`autopar trace`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAIN = 1
"""The thread of the main stream."""

MEASURED_PROCESSES = 1_000_000
"""The process of the first stage of a measured step: not one of a simulated step, so that one file may have both."""


def complete_event(name: str, process: int, thread: int, start_seconds: float, end_seconds: float, **args: Any) -> dict[str, Any]:
    """Return an event with its end; the format counts microseconds, and Perfetto whole nanoseconds.

    Perfetto cuts off what is less than one, of the start and of the duration, and leaves out an event that begins before the one
    before it ends: so both are whole ones, and the start a tenth more, which no arithmetic of floats takes below."""
    start, end = round(1e9 * start_seconds), round(1e9 * end_seconds)
    place = {"pid": process, "tid": thread, "ts": round(start / 1e3 + 1e-4, 4), "dur": round((end - start) / 1e3, 3)}
    return {"ph": "X", "name": name, **place, "args": args}


def metadata_event(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    """Return an event that says something of a process or thread."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def measured_step_events(spans: Mapping[int, Sequence[tuple[str, float]]]) -> Iterator[dict[str, Any]]:
    """Yield the events of each rank's spans, which follow each other."""
    for stage, (rank, labels) in enumerate(spans.items()):
        process, clock = MEASURED_PROCESSES + stage, 0.0
        yield metadata_event("process_name", process, 0, name=f"stage {stage}: rank {rank}, measured")
        yield metadata_event("process_sort_index", process, 0, sort_index=2 * stage + 1)
        yield metadata_event("thread_name", process, MAIN, name="main stream")
        for label, seconds in labels:
            if seconds > 0:
                yield complete_event(label, process, MAIN, clock, clock + seconds)
            clock += seconds
