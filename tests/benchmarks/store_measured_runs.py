"""Writes ``autopar/software/data/measured_runs.csv``: what the public table says of recipes. ``python
tests/benchmarks/store_measured_runs.py``; takes a second."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path

import autopar.software
from autopar.software.measured import MeasuredRun
from autopar.validate.published import measured_runs
from autopar.validate.rows import bundled_table, read_table

if __name__ == "__main__":
    path = Path(str(autopar.software.__file__)).parent / "data" / "measured_runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(MeasuredRun)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, measured_runs(read_table(bundled_table()))))
