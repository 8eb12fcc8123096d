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


def size_words(size_bytes: float | None) -> str:
    """Return a size in words, ``1.5 MiB``; ``-`` where there is none."""
    if size_bytes is None:
        return "-"
    name, unit = next((each for each in (("GiB", 2**30), ("MiB", 2**20)) if size_bytes >= 0.1 * each[1]), ("KiB", 2**10))
    return f"{size_bytes / unit:.1f} {name}"
