"""The command line in this process: exit status and what was said; a traceback is an exception."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import dataclass

from autopar.cli import main


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    out: str
    err: str
    seconds: float

    @property
    def is_one_line(self) -> bool:
        """Status 0, or 2 with one line of what is wrong (3: as many as it takes to say what would fit)."""
        said = self.err.count("autopar: error: ")
        after = self.err[self.err.find("autopar: error: ") :].strip().splitlines()
        return (
            (self.status == 0 and not said)
            or (self.status == 2 and said == 1 and len(after) == 1)
            or (self.status == 3 and said == 1)
        )


def answer(*words: object) -> Answer:
    """What the command line does with these words."""
    out, err, start = io.StringIO(), io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:  # argparse
            status = int(end.code or 0)
    return Answer(status, out.getvalue(), err.getvalue(), time.perf_counter() - start)
