"""Quantities in words. Needs the standard library alone: the command line reads it without torch."""

from __future__ import annotations


def seconds_words(value: float | None) -> str:
    """Return seconds in words, ``12.3 ms``; ``-`` where there is none."""
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    return f"{value / 1e-6:.3g} us"
