"""``autopar doctor``: captures a model, and lists what is refused, replicated, fixed or slow, before any plan is made."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from autopar.cli.console import Console


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 0 where a plan can be made, else 1."""
    from autopar.capture.models import load_model
    from autopar.doctor.examine import examine
    from autopar.precision import precision_of

    console.progress(f"capturing {arguments.model}")
    loaded = load_model(arguments.model, arguments.batch, arguments.seq)
    compute = precision_of(arguments.dtype, loaded.model).compute
    found = examine(loaded.model, loaded.example_inputs, compute, arguments.batch_dim)
    rows = [
        (each.kind, each.what + (f" (x {each.count})" if each.count > 1 else ""), each.where, each.remedy)
        for each in found.findings
    ]
    if rows:
        console.table(f"{loaded.name} in {compute}", ("", "what", "where", "remedy"), rows)
    if found.graph is not None:
        blocks, calls = len(found.graph.blocks), len(found.graph.calls)
        console.text(f"captured: {blocks} distinct blocks, {calls} calls")
    if not found.examined_lengths:
        console.text("not examined: whether lengths of inputs may change")
    verdict = "a plan can be made" if found.can_be_planned else "no plan can be made before what is refused is mended"
    console.text(f"{verdict}{'' if rows else '; nothing is replicated, fixed or slow'}")
    console.document({"can_be_planned": found.can_be_planned, "findings": [asdict(each) for each in found.findings]})
    return 0 if found.can_be_planned else 1
