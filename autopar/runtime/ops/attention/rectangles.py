"""The rectangles of a score matrix that a band leaves, as few as possible: what a kernel runs on one after the other.

Rows (queries) and columns (keys) are given as *spans* of the sequence, ``((first position, length), ...)`` in the order in which
a tensor holds them. The *band* ``(left, right)`` allows a query at position p the keys from ``p - left`` to ``p + right``; None
is unbounded, so ``(None, 0)`` is causal attention and ``(w - 1, 0)`` a sliding window of w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

Spans = tuple[tuple[int, int], ...]
Band = tuple[int | None, int | None]
Range = tuple[int, int]

FULL, CAUSAL, BANDED = "full", "causal", "banded"
TILE = 128
"""The fewest rows of a rectangle inside the band; it has as many rows as the window is wide, so that at most half of it is
masked."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows and columns of the tensors (not positions). `kind`: all of it, on and below its diagonal, or where the band allows it;
    then `offset` is the position of its first row minus that of its first column."""

    rows: Range
    columns: Range
    kind: str
    offset: int = 0


@lru_cache(maxsize=4096)
def rectangles(rows: Spans, columns: Spans, band: Band, tile: int = TILE) -> tuple[Rectangle, ...]:
    """The rectangles to compute; rows without a key are in none."""
    left, right = band
    wide = 0 if left is None or right is None else left + right + 1
    inside_band: list[Rectangle] = []
    for row, (first_row, height) in zip(_starts(rows), rows, strict=True):
        for column, (first_column, width) in zip(_starts(columns), columns, strict=True):
            inside = _band_rectangles(
                (first_row, first_row + height), (first_column, first_column + width), band, max(tile, wide)
            )
            for rectangle in inside:
                inside_band.append(_moved(rectangle, row - first_row, column - first_column))
    return tuple(_merged(inside_band))


@lru_cache(maxsize=4096)
def any_visible(rows: Spans, columns: Spans, band: Band) -> bool:
    """Return whether any query sees any key."""
    left, right = band
    return any(
        (left is None or last - 1 + at >= start - left) and (right is None or at <= start + height - 1 + right)
        for start, height in rows
        for at, last in columns
    )


def _starts(spans: Spans) -> Iterator[int]:
    start = 0
    for _, length in spans:
        yield start
        start += length


def _moved(rectangle: Rectangle, rows: int, columns: int) -> Rectangle:
    (a, b), (c, d) = rectangle.rows, rectangle.columns
    return replace(rectangle, rows=(a + rows, b + rows), columns=(c + columns, d + columns))


def _band_rectangles(rows: Range, columns: Range, band: Band, tile: int) -> Iterator[Rectangle]:
    """Rectangles in positions."""
    (first, last), (start, end), (left, right) = rows, columns, band
    if left is not None:
        start = max(start, first - left)
    if right is not None:
        end = min(end, last + right)
        first = max(first, start - right)
    if left is not None:
        last = min(last, end + left)
    if first >= last or start >= end:
        return
    below = left is None or start >= last - 1 - left
    above = right is None or end - 1 <= first + right
    if below and above:
        yield Rectangle((first, last), (start, end), FULL)
    elif below:
        assert right is not None
        yield from _triangle((first, last), (start, end), right)
    elif last - first <= tile:
        yield Rectangle((first, last), (start, end), BANDED, first - start)
    else:
        for at in range(first, last, tile):
            yield from _band_rectangles((at, min(at + tile, last)), (start, end), band, tile)


def _triangle(rows: Range, columns: Range, right: int) -> Iterator[Rectangle]:
    """Keys up to ``p + right``: those that all rows see, a square with the diagonal, and those that the rows below it see."""
    (first, last), (start, end) = rows, columns
    corner, bottom = first + right, end - right
    if start < corner:
        yield Rectangle((first, last), (start, corner), FULL)
    yield Rectangle((first, bottom), (corner, end), CAUSAL)
    if bottom < last:
        yield Rectangle((bottom, last), (corner, end), FULL)


def _merged(parts: list[Rectangle]) -> list[Rectangle]:
    """Adjacent full rectangles merged."""
    out: list[Rectangle] = []
    for rectangle in parts:
        at = 0
        while at < len(out):
            whole = _merge(out[at], rectangle)
            if whole is not None:
                rectangle, out, at = whole, out[:at] + out[at + 1 :], 0
            else:
                at += 1
        out.append(rectangle)
    return out


def _merge(a: Rectangle, b: Rectangle) -> Rectangle | None:
    if a.kind != FULL or b.kind != FULL:
        return None
    if a.rows == b.rows and a.columns[1] == b.columns[0]:
        return replace(a, columns=(a.columns[0], b.columns[1]))
    if a.columns == b.columns and a.rows[1] == b.rows[0]:
        return replace(a, rows=(a.rows[0], b.rows[1]))
    return None
