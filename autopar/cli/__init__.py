"""The command line. Errors of the user are one line on stderr; see `main` for exit statuses."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence

from autopar.cli.parser import build_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done, 1: a bug (with its traceback), 2: the user's input, 3: infeasible."""
    arguments = build_parser().parse_args(argv)
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])

    from autopar.cli.output import Output
    from autopar.errors import AutoparError, Infeasible

    try:
        return int(arguments.run(arguments, Output(arguments.json)))
    except Exception as error:
        if not isinstance(error, (AutoparError, *_runtime_errors())):
            raise
        status = int(getattr(error, "exit_status", 2))
        lines = str(error).splitlines() if isinstance(error, Infeasible) else [" ".join(str(error).split())]
        line = "\n".join(lines)
        print(f"autopar: error: {line}", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": line, "exit_status": status}}))
        return status
    except KeyboardInterrupt:
        return 130


def _runtime_errors() -> tuple[type[Exception], ...]:
    """The runtime's own errors, where it was loaded: it knows no other part of autopar."""
    module = sys.modules.get("autopar.runtime.errors")
    return (module.RuntimeProblem,) if module else ()


_COLLECT_AFTER = 200_000
"""Objects until the next collection. Tables and imports make millions that stay, and looking at them again takes a fifth of the
time of a plan."""
