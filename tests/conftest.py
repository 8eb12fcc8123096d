"""Fixtures for all tests. `tests` is put on the path so that `support` can be imported under one name everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The one pool of gloo processes."""
    pool = Ranks()
    yield pool
    pool.close()
