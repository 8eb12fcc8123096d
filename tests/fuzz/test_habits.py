"""Random sequences of what scripts do between steps, on four ranks beside one process: right, or refused in one line.

``AUTOPAR_FUZZ=5000 pytest tests/fuzz/test_habits.py`` takes so many; a failure names its seed, and the command that prints its
script."""

from __future__ import annotations

import os

import pytest
from support.fuzzing.habits.script import run_script, write_script
from support.fuzzing.habits.trial import try_many
from support.harness.rank_pool import RankPool

COUNT = int(os.environ.get("AUTOPAR_FUZZ", "300"))
TOGETHER = 6


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(TOGETHER, COUNT, TOGETHER))]
)
def test_right_or_refused(first: int, ranks: RankPool) -> None:
    tally = try_many(range(first, first + TOGETHER), ranks)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.equal, tally.refusals


def test_most_scripts_run_on_one_process() -> None:
    scripts = [write_script(seed) for seed in range(60)]
    assert scripts == [write_script(seed) for seed in range(60)]
    assert sum(not run_script(script).error for script in scripts) >= 50
