"""``autopar validate``: the cost models against published measurements, row by row, and the summary."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.console import Console, percent, seconds, size


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Prices every row of the table, the bundled one where none is named."""
    from autopar.validate.price import price_rows
    from autopar.validate.report import report
    from autopar.validate.rows import bundled_table, read_table

    path = Path(arguments.file) if arguments.file is not None else bundled_table()
    rows = read_table(path)
    console.progress(f"pricing {len(rows)} rows of {path.name}")
    found = report(price_rows(rows))
    document = found.document()
    found_rows = document["rows"]
    console.table(
        str(path.name),
        ("row", "model", "devices", "predicted", "measured", "error", "memory predicted", "measured", "error"),
        [_cells(each, row.model_family, row.n_gpus) for each, row in zip(found_rows, rows, strict=True) if not each["skipped"]],
    )
    left_out = [(each["id"], each["skipped"]) for each in document["rows"] if each["skipped"]]
    if left_out:
        console.table("Skipped rows", ("row", "why"), left_out)
    _summary(document["summary"], console)
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


def _summary(summary: dict[str, Any], console: Console) -> None:
    null = summary["null_model"]
    rows = [
        ("dense rows, median of the sources' medians", percent(summary["dense_median"]), percent(null["dense_median"]), "8 %"),
        ("dense rows, 90th percentile", percent(summary["dense_p90"]), percent(null["dense_p90"]), "25 %"),
        ("mixture-of-experts rows, median", percent(summary["moe_median"]), percent(null["moe_median"]), "20 %"),
        ("order of pairs in a sweep", _share(summary["order_accuracy"]), _share(null["order_accuracy"]), "0.85"),
        ("regret in a sweep, mean", percent(summary["regret_mean"]), percent(null["regret_mean"]), "5 %"),
        ("regret in a sweep, largest", percent(summary["regret_max"]), percent(null["regret_max"]), "15 %"),
    ]
    counts = f"{summary['expressed']} rows priced, {summary['skipped']} skipped"
    console.table(
        f"Summary: {counts}", ("measure", "cost models", f"constant utilisation {null['utilisation']:.2f}", "aim"), rows
    )
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
