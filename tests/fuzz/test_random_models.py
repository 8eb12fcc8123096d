"""Random small models on 2 and 4 ranks against one process: losses, gradients, parameters and buffers to 1e-9 in float64.

``AUTOPAR_FUZZ=5000 pytest tests/fuzz/test_random_models.py`` takes so many; a failure names its seed, and what makes it again."""

from __future__ import annotations

import os

import pytest
from support.fuzzing.models.many import many_trials
from support.harness.rank_pool import RankPool

COUNT = int(os.environ.get("AUTOPAR_FUZZ", "48"))
MOST_REFUSED = 0.2


def check(first: int, count: int, world: int, ranks: RankPool) -> None:
    tally = many_trials(range(first, first + count), ranks, world)
    assert not tally.wrong and not tally.badly_said, tally.failures
    assert tally.unsteady <= max(1, 0.03 * count)
    assert tally.refused <= max(3, MOST_REFUSED * count), [trial.refused for trial in tally.refusals]


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(12, COUNT, 12))])
def test_on_two_ranks(first: int, ranks: RankPool) -> None:
    check(first, min(12, COUNT - first), 2, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 102_000, 250))
def test_two_thousand_more(first: int, ranks: RankPool) -> None:
    check(first, 250, 0, ranks)
