"""The tests of every module of habits, which imports them; its rows are the parameters (tests/e2e/habits/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.harness.habits import OTHER_PLANS, check
from support.harness.rank_pool import RankPool


def test_habit(habit: str, request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path) -> None:
    check(getattr(request.module, habit), "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
def test_habit_under_other_plans(
    habit: str, force: str, request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path
) -> None:
    check(getattr(request.module, habit), force, ranks, tmp_path)
