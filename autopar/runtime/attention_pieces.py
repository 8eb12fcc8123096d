"""Which rectangles of an attention matrix a band leaves, as few as possible: what a kernel runs on one after the other.

Rows (queries) and columns (keys) are given as *spans* of the sequence, ``((first position, length), ...)`` in the order in which
a tensor holds them. The *band* ``(left, right)`` allows a query at position p the keys from ``p - left`` to ``p + right``; None
is without end, so ``(None, 0)`` is causal attention and ``(w - 1, 0)`` a sliding window of w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

Spans = tuple[tuple[int, int], ...]
Band = tuple[int | None, int | None]
Range = tuple[int, int]

WHOLE: Band = (None, None)
FULL, CAUSAL, BANDED = "full", "causal", "banded"
TILE = 128
"""The least rows of a tile; a tile has as many rows as the window is wide, so that at most half of what is computed is masked."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of the tensors (not positions). `kind`: all of it, on and below its diagonal, or where the band allows it;
    then `offset` is the position of its first row less that of its first column."""

    rows: Range
    columns: Range
    kind: str
    offset: int = 0


@lru_cache(maxsize=4096)
def pieces(rows: Spans, columns: Spans, band: Band, tile: int = TILE) -> tuple[Piece, ...]:
    """What is to be computed; rows without a key are in none."""
    left, right = band
    wide = 0 if left is None or right is None else left + right + 1
    found: list[Piece] = []
    for row, (first_row, height) in zip(_starts(rows), rows, strict=True):
        for column, (first_column, width) in zip(_starts(columns), columns, strict=True):
            inside = _rectangle((first_row, first_row + height), (first_column, first_column + width), band, max(tile, wide))
            for piece in inside:
                found.append(_moved(piece, row - first_row, column - first_column))
    return tuple(_joined(found))


@lru_cache(maxsize=4096)
def meets(rows: Spans, columns: Spans, band: Band) -> bool:
    """Whether any query sees any key."""
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


def _moved(piece: Piece, rows: int, columns: int) -> Piece:
    (a, b), (c, d) = piece.rows, piece.columns
    return replace(piece, rows=(a + rows, b + rows), columns=(c + columns, d + columns))


def _rectangle(rows: Range, columns: Range, band: Band, tile: int) -> Iterator[Piece]:
    """Pieces in positions."""
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
        yield Piece((first, last), (start, end), FULL)
    elif below:
        assert right is not None
        yield from _triangle((first, last), (start, end), right)
    elif last - first <= tile:
        yield Piece((first, last), (start, end), BANDED, first - start)
    else:
        for at in range(first, last, tile):
            yield from _rectangle((at, min(at + tile, last)), (start, end), band, tile)


def _triangle(rows: Range, columns: Range, right: int) -> Iterator[Piece]:
    """Keys up to ``p + right``: what all rows see, a square with the diagonal, and what the rows below it see."""
    (first, last), (start, end) = rows, columns
    corner, bottom = first + right, end - right
    if start < corner:
        yield Piece((first, last), (start, corner), FULL)
    yield Piece((first, bottom), (corner, end), CAUSAL)
    if bottom < last:
        yield Piece((bottom, last), (corner, end), FULL)


def _joined(found: list[Piece]) -> list[Piece]:
    """Full pieces side by side, or one below the other, as one."""
    out: list[Piece] = []
    for piece in found:
        at = 0
        while at < len(out):
            whole = _join(out[at], piece)
            if whole is not None:
                piece, out, at = whole, out[:at] + out[at + 1 :], 0
            else:
                at += 1
        out.append(piece)
    return out


def _join(a: Piece, b: Piece) -> Piece | None:
    if a.kind != FULL or b.kind != FULL:
        return None
    if a.rows == b.rows and a.columns[1] == b.columns[0]:
        return replace(a, columns=(a.columns[0], b.columns[1]))
    if a.columns == b.columns and a.rows[1] == b.rows[0]:
        return replace(a, rows=(a.rows[0], b.rows[1]))
    return None
