"""A process of a run that has failed ends within a time, whatever its threads, destructors and handlers at exit wait for.

Python joins threads, runs handlers and destroys objects when it ends, and a process group may wait in its destructor for
collectives whose peers are stopped. The timer here is a thread of `faulthandler`, which needs no interpreter.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import IO, Any

NEVER = float("inf")
"""Moments are those of `time.monotonic`."""
OWN_SHARE = 0.6
"""Of the patience: how long a process in which an exception was uncaught may take to end."""
_SHORTEST_SECONDS = 0.2
_longest_patience = 0.0
_uncaught_by = NEVER
"""When a process in which an exception was uncaught has to have ended."""


def watch_the_end(patience_seconds: float, problem_by: Callable[[], float]) -> None:
    """From now on: when Python ends after an uncaught exception, or before the moment that `problem_by` gives, the process ends
    in time."""
    global _longest_patience
    _longest_patience = max(_longest_patience, patience_seconds)
    _register(problem_by)


def end_within(seconds: float) -> None:
    """From now on the process has so long to end by itself; then it ends as after an uncaught exception, with status 1."""
    faulthandler.dump_traceback_later(max(seconds, _SHORTEST_SECONDS), exit=True, file=_nowhere())


def end_now(message: str, status: int) -> None:
    """Says the message and ends the process, without joining, handlers and destructors; within a second also where what it
    prints is not read."""
    end_within(1.0)
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)


def uncaught() -> None:
    """An exception was uncaught. If Python ends now, and does not only print it, the process has a share of the patience."""
    global _uncaught_by
    _uncaught_by = min(_uncaught_by, time.monotonic() + OWN_SHARE * _longest_patience)


def is_late() -> bool:
    """Whether the main thread has ended with an exception, and other threads hold the process for too long."""
    global _uncaught_by
    if time.monotonic() <= _uncaught_by:
        return False
    if threading.main_thread().is_alive():  # it was only printed
        _uncaught_by = NEVER
        return False
    return True


@cache
def _register(problem_by: Callable[[], float]) -> None:
    def ending() -> None:
        left = min(_uncaught_by, problem_by()) - time.monotonic()
        if 0 < left < NEVER:
            end_within(left)

    atexit.register(ending)


@cache
def _nowhere() -> IO[Any]:
    return open(os.devnull, "w")
