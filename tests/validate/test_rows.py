"""The reader of tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.oracles.published_rows import table

from autopar.validate.rows import TableError, bundled_table, read_table


def written(tmp_path: Path, **cells: str) -> Path:
    """The first row of the bundled table with other cells."""
    with bundled_table().open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        first, columns = next(lines), lines.fieldnames or ()
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, columns)
        out.writeheader()
        out.writerow(first | cells)
    return path


def test_bundled_table() -> None:
    rows = table()
    assert len(rows) == 542
    one = rows["mlm-001"]
    assert (one.layers, one.hidden, one.tp, one.global_batch, one.cp) == (32, 4096, 4, 8, 1)
    assert one.measured_memory_bytes == pytest.approx(57.144e9)  # the source counts in 1e9 bytes
    assert rows["tt-001"].measured_memory_bytes == pytest.approx(82.4 * 2**30)


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    with bundled_table().open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        first, columns = next(lines), list(lines.fieldnames or ())
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, [*reversed(columns), "another"])
        out.writeheader()
        out.writerow(first)
    assert read_table(path) == read_table(bundled_table())[:1]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"layers": "32.5"}, ["line 2", "layers", "whole number"]),
        ({"step_seconds": "fast"}, ["line 2", "step_seconds", "'fast'"]),
        ({"step_seconds": "nan"}, ["step_seconds"]),
        ({"step_seconds": "-1"}, ["step_seconds", "at least 0"]),
        ({"hidden": "inf"}, ["hidden"]),
        ({"id": ""}, ["line 2", "id"]),
    ],
)
def test_wrong_cells_are_named(tmp_path: Path, cells: dict[str, str], words: list[str]) -> None:
    with pytest.raises(TableError) as told:
        read_table(written(tmp_path, **cells))
    assert all(word in str(told.value) for word in words) and "\n" not in str(told.value)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read"):
        read_table(tmp_path / "nowhere.csv")
    other = tmp_path / "other.csv"
    other.write_text("id,layers\nx,1\n")
    with pytest.raises(TableError, match="lacks the columns source, model_family"):
        read_table(other)
    other.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(TableError):
        read_table(other)
    other.write_text(bundled_table().read_text(encoding="utf-8").splitlines()[0] + "\n")
    with pytest.raises(TableError, match="no rows"):
        read_table(other)


def test_out_of_memory_is_read_from_notes(tmp_path: Path) -> None:
    assert read_table(written(tmp_path, notes="OOM with 8 GPUs", step_seconds=""))[0].out_of_memory
    assert not read_table(written(tmp_path, notes="OOM with 4 GPUs", step_seconds="3.0"))[0].out_of_memory
    assert not read_table(written(tmp_path, notes="room for more", step_seconds=""))[0].out_of_memory
