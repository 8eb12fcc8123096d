"""Figures of a report in words, and its tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..step.out_of_memory import size_words


def seconds_words(value: float | None) -> str:
    """``12.3 ms``; ``-`` where there is none."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.3g} us"


def size_or_none(value: float | None) -> str:
    """``1.5 MiB``; ``-`` where there is none."""
    return "-" if value is None else size_words(value)


def ratio_words(measured: float | None, predicted: float | None) -> str:
    """Measured over predicted."""
    return f"{measured / predicted:.2f}" if measured is not None and predicted else "-"


def as_text(found: dict[str, Any]) -> str:
    """What `compare.comparison` found, as lines."""
    lines = list(found["summary"])
    for title, header, rows in found["tables"]:
        lines += ["", title, *_table(header, rows)]
    if found["advice"]:
        lines += ["", "What is off", *(f"- {each}" for each in found["advice"])]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    ]
