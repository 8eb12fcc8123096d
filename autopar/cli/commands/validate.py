"""``autopar validate``: the cost models against published measurements, row by row, and the summary."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.cli.console import Console, percent, seconds, size


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Prices every row of the table, the bundled one where none is named."""
    from autopar.validate.constants import leave_one_source_out, unseen_errors, unseen_table
    from autopar.validate.price import Session, price_rows
    from autopar.validate.report import report
    from autopar.validate.rows import bundled_table, read_table

    path = Path(arguments.file) if arguments.file is not None else bundled_table()
    rows = read_table(path)
    console.progress(f"pricing {len(rows)} rows of {path.name}")
    session = Session()
    found = report(price_rows(rows, session=session))
    document = found.document()
    if arguments.leave_one_source_out:
        console.progress("fitting the constants of each software without each of its sources")
        unseen = report(leave_one_source_out(rows, session, console.progress)).document()
        document["leave_one_source_out"] = unseen["summary"]
        for each, other in zip(document["rows"], unseen["rows"], strict=True):
            each["error_left_out"] = other["error"]
    found_rows = document["rows"]
    console.table(
        str(path.name),
        ("row", "model", "devices", "predicted", "measured", "error", "memory predicted", "measured", "error"),
        [_cells(each, row.model_family, row.n_gpus) for each, row in zip(found_rows, rows, strict=True) if not each["skipped"]],
    )
    left_out = [(each["id"], each["skipped"]) for each in document["rows"] if each["skipped"]]
    if left_out:
        console.table("Skipped rows", ("row", "why"), left_out)
    others = Counter(text for each in document["rows"] for text in each["assumed"] if text.startswith("no constants of"))
    if others:
        console.table("Rows priced with constants of other software", ("rows", "why"), [(n, text) for text, n in others.items()])
    _summary(document["summary"], document.get("leave_one_source_out"), console)
    if arguments.file is None:
        later = unseen_errors(price_rows(read_table(unseen_table()), session=session))
        document["later_releases"] = [asdict(each) for each in later]
        rows_of = [(each.kind, each.rows, percent(each.median), percent(each.p90), percent(each.signed)) for each in later]
        header = ("runs", "rows", "median error", "90th percentile", "median, signed")
        console.table(f"Later releases, which no constant has seen ({unseen_table().name})", header, rows_of)
    console.document(document)
    return 0


def _cells(each: dict[str, Any], model: str, devices: int | None) -> tuple[str, ...]:
    memory = each["predicted_memory_bytes"] if each["measured_memory_bytes"] or each["out_of_memory"] else None
    return (
        each["id"],
        model,
        str(devices or "-"),
        seconds(each["predicted_step_seconds"]),
        seconds(each["measured_step_seconds"]),
        percent(each["error"]),
        size(memory),
        "out of memory" if each["out_of_memory"] else size(each["measured_memory_bytes"]),
        percent(each["memory_error"]),
    )


def _summary(summary: dict[str, Any], unseen: dict[str, Any] | None, console: Console) -> None:
    null = summary["null_model"]
    columns = [summary, *([unseen] if unseen is not None else []), null]
    measures = (
        ("dense rows, median of the sources' medians", "dense_median", percent, "6 %"),
        ("dense rows, 90th percentile", "dense_p90", percent, "15 %"),
        ("mixture-of-experts rows, median", "moe_median", percent, "15 %"),
        ("order of pairs in a sweep, mean of the sources", "order_accuracy", _share, "0.90"),
        ("regret in a sweep, mean", "regret_mean", percent, "5 %"),
        ("regret in a sweep, largest", "regret_max", percent, ""),
    )
    rows = [(text, *(show(column[name]) for column in columns), aim) for text, name, show, aim in measures]
    left_out = ("without its source",) if unseen is not None else ()
    header = ("measure", "constants of the software", *left_out, f"constant utilisation {null['utilisation']:.2f}", "aim")
    counts = f"{summary['expressed']} rows priced, {summary['skipped']} skipped"
    console.table(f"Summary: {counts}", header, rows)
    names = ("allocated", "reserved", "nvidia_smi", "unstated")
    memory = [(name, summary["memory"][name]) for name in names]
    cells = [(name, each["rows"], percent(each["median"]), percent(each["p90"]), percent(each["worst"])) for name, each in memory]
    console.table("Peak memory by how it was measured", ("measure", "rows", "median error", "90th percentile", "largest"), cells)
    failed = summary["memory"]["out_of_memory"]
    console.text(
        f"Of {failed['rows']} runs that went out of memory {failed['told']} are predicted to; of {failed['ran']} that ran "
        f"{failed['ran_but_predicted_not_to_fit']} are predicted not to fit."
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
