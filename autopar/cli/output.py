"""Standard output and standard error, which may be full, closed, or read by somebody who has enough."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


class OutputProblem(Exception):
    """Standard output cannot be written; `reader_left`: whoever read it has enough (``autopar ... | head``)."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason.strerror or str(reason))
        self.reader_left = isinstance(reason, BrokenPipeError)


@contextlib.contextmanager
def writing_output() -> Iterator[None]:
    """Tells a failure of standard output from all others."""
    try:
        yield
    except OSError as error:
        raise OutputProblem(error) from None


def flush_output() -> None:
    """All that was printed is written, or OutputProblem."""
    with writing_output():
        sys.stdout.flush()


def give_up_output() -> None:
    """Nothing more goes to standard output, not even what is flushed when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(status: int) -> NoReturn:
    """End at once: gloo's threads, which let go of their last tensors, abort now and then while the interpreter ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def say(line: str) -> None:
    """One line on stderr, at once. A stderr that cannot be written is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def write_any_text() -> None:
    """Write a ``?`` for what a terminal or file cannot show in its encoding."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
