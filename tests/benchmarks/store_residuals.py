"""Writes ``autopar/software/data/residuals.json``: how far off predictions of the public table are. ``python
tests/benchmarks/store_residuals.py``; a test says when that is due."""

from __future__ import annotations

import json
from pathlib import Path

import autopar.software
from autopar.validate.price import price_rows
from autopar.validate.report import report
from autopar.validate.residuals import all_residuals
from autopar.validate.rows import bundled_table, read_table


def main() -> None:
    path = Path(str(autopar.software.__file__)).parent / "data" / "residuals.json"
    found = all_residuals(report(price_rows(read_table(bundled_table()))).points)
    path.write_text("{\n" + ",\n".join(f'  "{kind}": {json.dumps(pairs)}' for kind, pairs in found.items()) + "\n}\n")


if __name__ == "__main__":
    main()
