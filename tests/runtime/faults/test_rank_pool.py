"""The pool of ranks: a crash in C++ is made again once, with a warning; what crashes each time is an error."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
from support.harness.rank_pool import RankCrash, RankPool


def crash_until(marker: str) -> int:
    """Ends by SIGSEGV in the first process that comes here."""
    if not os.path.exists(marker):
        Path(marker).touch()
        crash()
    return 7


def crash() -> None:
    faulthandler.disable()  # no stack of this one
    os.kill(os.getpid(), signal.SIGSEGV)


def test_one_crash(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="crash_until is run again, since rank 0: .* status -11"):
        assert ranks.run(crash_until, str(tmp_path / "marker"), world=1) == [7]


def test_crashes(ranks: RankPool) -> None:
    with pytest.warns(UserWarning, match="run again"), pytest.raises(RankCrash, match="status -11"):
        ranks.run(crash, world=1)
