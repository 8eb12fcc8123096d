"""Fixtures of the tests of the command line."""

from __future__ import annotations

from functools import partial

import pytest
from support.harness.launch import spawn
from support.harness.rank_pool import RankPool

from autopar.verification import proof


@pytest.fixture
def forked_ranks(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``autopar verify`` runs on forked processes, which import nothing; test_commands.py has one on spawned ones."""
    monkeypatch.setattr(proof, "spawn", partial(spawn, ranks))
