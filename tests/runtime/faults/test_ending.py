"""A process that has failed ends in time, whatever its threads, destructors and handlers at exit wait for."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pytest
from support.harness.rank_pool import RankError, RankPool

PATIENCE_SECONDS = 1.5
HANGS_SECONDS = 30.0


class Slow:
    """Its destructor hangs."""

    def __del__(self) -> None:
        time.sleep(HANGS_SECONDS)


def fail(what_hangs: str) -> None:
    """An uncaught exception of a rank in which something hangs when Python ends."""
    from support.key_value_store import Store

    from autopar.runtime.comm.ending import end_now
    from autopar.runtime.comm.heartbeat import Heartbeat
    from autopar.runtime.patches import apply_patches

    apply_patches()
    heartbeat = Heartbeat(Store(), 0, 2, str, PATIENCE_SECONDS)
    heartbeat.start()
    if what_hangs == "a thread":
        threading.Thread(target=time.sleep, args=(HANGS_SECONDS,)).start()
    if what_hangs == "a handler at exit":
        atexit.register(time.sleep, HANGS_SECONDS)
    if what_hangs == "a destructor":
        sys.slow = Slow()  # type: ignore[attr-defined]
    if what_hangs == "what reads the output":
        sys.stdout = os.fdopen(os.pipe()[1], "w")
        threading.Thread(target=lambda: print("x" * 2**20), daemon=True).start()
        time.sleep(0.2)
        end_now("its problem", 1)
    sys.excepthook(ValueError, ValueError("on purpose"), None)
    ctypes.pythonapi.Py_Exit(1)


def nothing() -> None:
    """Of a rank."""


@pytest.mark.parametrize("what_hangs", ["nothing", "a thread", "a handler at exit", "a destructor", "what reads the output"])
def test_it_ends_in_time(what_hangs: str, ranks: RankPool) -> None:
    ranks.run_alone(nothing)  # what ranks are forked from has started
    began = time.monotonic()
    with pytest.raises(RankError, match="ended with status 1$"):
        ranks.run_alone(fail, what_hangs)
    assert time.monotonic() - began < PATIENCE_SECONDS + 1.0


class SlowDisk:
    """A stream of a file on a disk that other processes keep busy."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, text: str) -> None:
        time.sleep(1.2)
        self.file.write(text)

    def flush(self) -> None:
        self.file.flush()


def end_on(path: str) -> None:
    """A rank that ends because of another, and writes to a slow disk."""
    from autopar.runtime.comm.ending import end_now

    with open(path, "w") as file:
        sys.stderr = SlowDisk(file)  # type: ignore[assignment]
        end_now("its problem", 1)


def test_a_slow_disk_loses_no_line(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ended with status 1$"):
        ranks.run_alone(end_on, str(tmp_path / "errors"))
    assert (tmp_path / "errors").read_text() == "its problem\n"


class Owner:
    """Of a heartbeat."""


def go_on(patience_seconds: float) -> tuple[bool, bool]:
    """A rank that drops its model because of the problem, and one that only printed an exception, go on."""
    from support.key_value_store import Store

    from autopar.runtime.comm import ending
    from autopar.runtime.comm.heartbeat import Heartbeat
    from autopar.runtime.patches import apply_patches

    apply_patches()
    heartbeat, owner = Heartbeat(Store(), 0, 2, str, patience_seconds), Owner()
    heartbeat.start()
    heartbeat.stop_with(owner)
    sys.excepthook(ValueError, ValueError("printed"), None)
    heartbeat._set_problem("rank 1 failed")
    heartbeat.is_public = True
    del owner
    time.sleep(1.5 * patience_seconds)
    return heartbeat.judge.is_alive(), ending.is_late()


def test_who_goes_on_is_not_ended(ranks: RankPool) -> None:
    assert ranks.run_alone(go_on, 0.6) == (False, False)
