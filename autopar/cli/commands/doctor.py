"""``autopar doctor``: captures a model, and lists what is refused, replicated, fixed or slow, before any plan is made."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from autopar.cli.console import Console
from autopar.errors import AutoparError, BatchError
from autopar.files import write_whole


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
    document = {"can_be_planned": found.can_be_planned, "findings": [asdict(each) for each in found.findings]}
    console.document(document | ({"lengths": _lengths(arguments, console)} if arguments.data else {}))
    return 0 if found.can_be_planned else 1


def _lengths(arguments: argparse.Namespace, console: Console) -> dict[int, int]:
    """Show the lengths of documents in the data, and write them where that is asked for; return how many have each."""
    from autopar.capture.models import factory_of
    from autopar.cost_models.hardware.workload import DocumentLengths
    from autopar.doctor.data_lengths import document_lengths

    loader = factory_of(arguments.data)
    try:
        counts = document_lengths(loader())
    except AutoparError:
        raise
    except Exception as error:
        line = next(iter(str(error)[:200].splitlines()), "")
        raise BatchError(f"{arguments.data} failed: {type(error).__name__}: {line}") from error
    mean = sum(length * count for length, count in counts.items()) / sum(counts.values())
    console.text(
        f"{sum(counts.values())} documents of {min(counts)} to {max(counts)} tokens, {mean:.4g} on average; a token is in one of "
        f"{DocumentLengths.parse(counts).tokens:.4g}"
    )
    if arguments.output:
        write_whole(arguments.output, json.dumps(counts) + "\n")
    return counts
