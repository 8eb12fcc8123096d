"""Writes what the public table says of other software into ``autopar/software/data``: ``measured_runs.csv`` (takes a second) and,
with ``--residuals``, ``residuals.json`` (prices the table). ``python tests/benchmarks/store_measured_runs.py``."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

import autopar.software
from autopar.software.by_hand import MeasuredRun
from autopar.validate.price import price_rows
from autopar.validate.report import report
from autopar.validate.rows import bundled_table, read_table

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    from support.published_runs import all_residuals, measured_runs

    folder = Path(str(autopar.software.__file__)).parent / "data"
    rows = read_table(bundled_table())
    with (folder / "measured_runs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(MeasuredRun)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, measured_runs(rows)))
    if "--residuals" in sys.argv:
        found = all_residuals(report(price_rows(rows)).points)
        lines = [f'  "{kind}": {json.dumps(pairs)}' for kind, pairs in found.items()]
        (folder / "residuals.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
