"""A process of a run that has failed ends within a time, whatever its threads, destructors and handlers at exit wait for.

Python joins threads, runs handlers and destroys objects when it ends, and a process group may wait in its destructor for
collectives whose peers are stopped. The timer here is a thread of `faulthandler`, which needs no interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
from functools import cache
from typing import IO, Any

NEVER = float("inf")
"""Moments are those of `time.monotonic`."""
OWN_SHARE = 0.6
"""The share of the patience that a process in which an exception was uncaught may take to end."""
_SHORTEST_SECONDS = 0.2
_PIPE_SECONDS, _FILE_SECONDS = 1.0, 10.0
"""The time that a line may take to be written, where nobody may read it and where somebody does."""
_longest_patience = 0.0
_uncaught_by = NEVER
"""The moment by which a process in which an exception was uncaught has to have ended."""


def lengthen_patience(patience_seconds: float) -> None:
    """Let the process take its share of this patience at least, after an uncaught exception."""
    global _longest_patience
    _longest_patience = max(_longest_patience, patience_seconds)


def end_within(seconds: float) -> None:
    """End the process as after an uncaught exception, with status 1, unless it ends by itself in so many seconds."""
    faulthandler.dump_traceback_later(max(seconds, _SHORTEST_SECONDS), exit=True, file=_nowhere())


def end_now(message: str, status: int) -> None:
    """Say the message and end the process, without joining, handlers and destructors; within a second also where what it
    prints is not read."""
    # A disk under load may take seconds to write the one line that names what failed.
    end_within(_FILE_SECONDS if _takes_output(sys.stderr) else _PIPE_SECONDS)
    print(message, file=sys.stderr, flush=True)
    end_within(_PIPE_SECONDS)
    sys.stdout.flush()
    os._exit(status)


def _takes_output(stream: Any) -> bool:
    """Return whether a line that is written to the stream now does not wait for a reader."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (AttributeError, OSError, TypeError, ValueError):  # it is no file
        return False


def uncaught() -> None:
    """An exception was uncaught. If Python ends now, and does not only print it, the process has a share of the patience."""
    global _uncaught_by
    _uncaught_by = min(_uncaught_by, time.monotonic() + OWN_SHARE * _longest_patience)


def is_late() -> bool:
    """Return whether the main thread has ended with an exception, and other threads hold the process for too long."""
    global _uncaught_by
    if time.monotonic() <= _uncaught_by:
        return False
    if threading.main_thread().is_alive():  # it was only printed
        _uncaught_by = NEVER
        return False
    return True


def end_in_time(problem_by: float) -> None:
    """End the process, for which Python runs its handlers at exit, in time after an uncaught exception, or before the moment
    `problem_by`."""
    left = min(_uncaught_by, problem_by) - time.monotonic()
    if 0 < left < NEVER:
        end_within(left)


@cache
def _nowhere() -> IO[Any]:
    return open(os.devnull, "w")
