"""Fixtures for all tests. `tests` is put on the path so that `support` can be imported under one name everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.ranks import Ranks  # noqa: E402

POOL = pytest.StashKey[Ranks]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The process that ranks are forked from imports torch while the first tests run."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items) and not session.config.option.collectonly:
        session.config.stash[POOL] = Ranks()


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Ranks:
    """The one pool of gloo processes."""
    return pytestconfig.stash[POOL]
