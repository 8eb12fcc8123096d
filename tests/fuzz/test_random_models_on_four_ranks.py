"""Further random models (`test_random_models`) on meshes of two axes, pipelines of shards and four data ranks."""

from __future__ import annotations

import os

import pytest
from support.fuzzing.models.many import many_trials
from support.harness.rank_pool import RankPool

COUNT = int(os.environ.get("AUTOPAR_FUZZ", "30"))


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, COUNT, 10))])
def test_on_four_ranks(first: int, ranks: RankPool) -> None:
    count = min(10, COUNT - first)
    tally = many_trials(range(50_000 + first, 50_000 + first + count), ranks, 4)
    assert not tally.wrong and not tally.badly_said, tally.failures
    assert tally.unsteady <= max(1, 0.03 * count)
    assert tally.refused <= max(3, 0.2 * count), [trial.refused for trial in tally.refusals]
