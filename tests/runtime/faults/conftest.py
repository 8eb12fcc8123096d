"""Fixtures of the tests of faults."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
from support.harness.failing_run import make_plan_text


@pytest.fixture(scope="session")
def plans() -> Callable[[str], str]:
    """The text of a plan by its name in `failing_run.PLANS`."""
    return lru_cache(make_plan_text)
