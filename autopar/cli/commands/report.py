"""``autopar report``: a page of the plan to look at; ``autopar trace``: its simulated step for Perfetto; ``autopar compare``: a
measured step beside the one that its plan predicted. All need the file only."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.console import Console, seconds, size
from autopar.cli.evaluation import with_plan
from autopar.errors import Infeasible
from autopar.files import check_target, write_whole
from autopar.ir.plan_file.plan_file import Plan

if TYPE_CHECKING:
    from autopar.report.search_facts import SearchedChange


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Writes the page or, for ``autopar trace``, the trace; for ``autopar compare``, says where two steps differ."""
    if arguments.command == "compare":
        return _compare(plan, arguments, console)
    check_target(arguments.output)
    document = _trace(plan, arguments) if arguments.command == "trace" else _page(plan, arguments, console)
    console.text(f"written to {arguments.output}: " + ", ".join(f"{name} {value}" for name, value in document.items()))
    console.document({"output": arguments.output, **document})
    return 0


def _compare(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    from autopar.explain.measured_file import read_measured
    from autopar.report.predicted_step import predicted_step
    from autopar.runtime.report.compare import comparison

    path = Path(arguments.plan).with_name("measured.json") if arguments.measured is None else arguments.measured
    measured = read_measured(path, plan)
    predicted = predicted_step(plan, measured["compiled"])
    found = comparison(measured, predicted)
    console.text("\n".join(found["summary"]) + "\n")
    for title, header, rows in found["tables"]:
        console.table(title, header, rows)
    console.text("What is off\n" + "\n".join(f"- {line}" for line in found["advice"]))
    console.document({"measured": measured, "predicted": predicted, "advice": found["advice"]})
    return 0


def _page(plan: Plan, arguments: argparse.Namespace, console: Console) -> dict[str, str]:
    from autopar.report.page import report_page

    beside = Path(arguments.plan).with_name("measured.json")
    path = arguments.measured or (str(beside) if beside.exists() else "")
    measured = None
    if path:
        from autopar.explain.measured_file import read_measured

        measured = read_measured(path, plan)
    text = report_page(plan, measured, _searched(plan, arguments, console))
    write_whole(arguments.output, text)
    return {"page": size(len(text.encode())), "measured": path or "no step"}


def _searched(plan: Plan, arguments: argparse.Namespace, console: Console) -> list[SearchedChange]:
    """Search under each constraint of ``--what-if``; say those under which nothing fits."""
    if not arguments.what_if:
        return []
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.explain.what_if import parse_what_if, plan_what_if, what_if_options
    from autopar.ir.pipeline.stage_variants import without_stage_variants
    from autopar.report.search_facts import SearchedChange

    cluster, options = Cluster.from_dict(plan.document.cluster.description), what_if_options(plan, arguments.time_limit)
    questions, out = [(text, parse_what_if(text)) for text in arguments.what_if], []
    for text, question in questions:
        console.progress(f"planning with {text}")
        try:
            _, found = plan_what_if(without_stage_variants(plan.graph), cluster, options, question, console.progress)
        except Infeasible as error:
            console.progress(f"{text}: {str(error).splitlines()[0]}")
            continue
        out.append(SearchedChange(text, found.graph, found.candidate, found.evaluation, found.cut_short))
    return out


def _trace(plan: Plan, arguments: argparse.Namespace) -> dict[str, str]:
    from autopar.report.page import plan_timeline
    from autopar.report.timeline import chrome_trace, measured_events

    _, timeline = plan_timeline(plan)
    trace = chrome_trace(plan, timeline)
    if arguments.measured:
        trace["traceEvents"] += measured_events(arguments.measured)
    write_whole(arguments.output, json.dumps(trace, separators=(",", ":"), allow_nan=False))
    about = trace["otherData"]
    return {
        "step": seconds(about["step_seconds"]),
        "events": str(len(trace["traceEvents"])),
        "processes": about["ranks"],
        "streams": about["streams"],
    }
