"""``autopar compare``: a measured step beside the one that its plan predicted."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.console import Console
from autopar.cli.evaluation import with_plan
from autopar.ir.plan_file.plan_file import Plan


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Reads the two files, and says where they differ."""
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
