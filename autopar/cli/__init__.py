"""The command line. Start at `parser.py` (arguments), then `commands/` (one module per command) and `tables/` (what they print).

Imports everything else of autopar, but only when a command runs. A user's error is one line on stderr; see `main` for the exit
statuses.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
from collections.abc import Sequence

from autopar.cli.output import OutputProblem, flush_output, give_up_output, say, write_any_text, writing_output
from autopar.cli.parser import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done, 1: a bug (with its traceback), 2: the user's input, 3: infeasible, 130: interrupted."""
    write_any_text()
    try:
        arguments = build_parser().parse_args(argv)
        gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
        atexit.register(gc.freeze)  # else the end of the process looks through a million objects, for two seconds
        status = _run(arguments)
        flush_output()
        return status
    except KeyboardInterrupt:
        say("autopar: interrupted")
        return 130
    except OutputProblem as problem:
        give_up_output()
        if problem.reader_left:
            return 0
        say(f"autopar: error: cannot write the output: {problem}")
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from autopar.cli.console import Console
    from autopar.errors import AutoparError, Infeasible

    try:
        return int(arguments.run(arguments, Console(arguments.json)))
    except AutoparError as error:
        status = int(getattr(error, "exit_status", 2))
        lines = str(error).splitlines() if isinstance(error, Infeasible) else [" ".join(str(error).split())]
        line = "\n".join(lines)
        say(f"autopar: error: {line}")
        if arguments.json:
            with writing_output():
                print(json.dumps({"error": {"type": type(error).__name__, "message": line, "exit_status": status}}))
        return status


_GC_THRESHOLD = 5_000_000
"""Allocations until the next garbage collection. Tables and imports make millions of objects that stay alive; scanning them at
the default threshold takes a fifth of the time of a plan, and a thirtieth at 200,000 (for 3 % more memory in the largest)."""
