"""Rectangles of a band against every pair of positions."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.runtime.ops.attention.rectangles import BANDED, CAUSAL, Band, Spans, any_visible, rectangles

SPANS: tuple[Spans, ...] = (((0, 12),), ((4, 5),), ((0, 3), (9, 3)), ((3, 3), (6, 3)), ((8, 4), (2, 2)))
BANDS: tuple[Band, ...] = ((None, None), (None, 0), (None, 2), (3, 0), (0, 0), (2, 2), (20, 0), (1, None), (5, 1), (0, None))


def positions(spans: Spans) -> list[int]:
    return [first + index for first, length in spans for index in range(length)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("tile", [1, 2, 128])
def test_every_allowed_pair_once(band: Band, tile: int) -> None:
    left, right = band
    for rows, columns in product(SPANS, SPANS):
        queries, keys = positions(rows), positions(columns)
        allowed = {
            (i, j)
            for (i, p), (j, t) in product(enumerate(queries), enumerate(keys))
            if (left is None or t >= p - left) and (right is None or t <= p + right)
        }
        found: list[tuple[int, int]] = []
        for piece in rectangles(rows, columns, band, tile):
            for i, j in product(range(*piece.rows), range(*piece.columns)):
                row, column = i - piece.rows[0], j - piece.columns[0]
                if piece.kind == CAUSAL:
                    keep = column <= row
                elif piece.kind == BANDED:
                    assert queries[i] - keys[j] == row + piece.offset - column
                    keep = (i, j) in allowed
                else:
                    keep = True
                found += [(i, j)] * keep
        assert sorted(found) == sorted(allowed), (rows, columns)
        assert any_visible(rows, columns, band) == bool(allowed)


def test_mirrored_chunks_are_few_rectangles() -> None:
    """Causal, 2 chunks of queries on 2 chunks of another rank's keys: two of the four products, in one rectangle."""
    for rank, other in product(range(4), range(4)):
        rows, columns = (tuple((chunk * 6, 6) for chunk in (2 * at, 7 - 2 * at)) for at in (rank, other))
        found = rectangles(rows, columns, (None, 0))
        assert len(found) == (3 if rank == other else 1)
        area = sum((p.rows[1] - p.rows[0]) * (p.columns[1] - p.columns[0]) / (2 if p.kind == CAUSAL else 1) for p in found)
        assert area == 2 * 36


def test_a_window_costs_its_width() -> None:
    found = rectangles(((0, 4096),), ((0, 4096),), (127, 0))
    area = sum((p.rows[1] - p.rows[0]) * (p.columns[1] - p.columns[0]) for p in found)
    assert area <= 4096 * 256
