"""Random models at other sizes of the batch than their example's, in process: each that the program takes is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fuzzing.models.other_batches import check_batches

SEEDS = 20


@pytest.mark.parametrize("first", [0, *(pytest.param(20 * part, marks=pytest.mark.slow) for part in range(1, 20))])
def test_graphs_hold_for_batches_that_they_take(first: int, tmp_path: Path) -> None:
    found = {seed: list(check_batches(seed, tmp_path)) for seed in range(first, first + SEEDS)}
    assert not {seed: wrong for seed, lines in found.items() if (wrong := [line for line in lines if line])}
    assert sum(map(len, found.values())) > SEEDS
