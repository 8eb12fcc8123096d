"""Lines while rank 0 plans, and on the plan that it chose, by the logger ``autopar``."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from autopar.ir.describe import cut_short_text
from autopar.ir.plan_file.plan_file import Plan

LOGGER = logging.getLogger("autopar")

_EVERY_SECONDS = 5.0
"""The seconds from one line of progress to the next."""


@contextlib.contextmanager
def saying_progress(model: str, cluster: str, time_limit_seconds: float) -> Iterator[None]:
    """Write a line at the start, and one now and then; on a terminal it is written over itself, and gone at the end."""
    started, done = time.monotonic(), threading.Event()
    LOGGER.info("planning %s for %s (at most %g s)", model, cluster, time_limit_seconds)
    terminal = sys.stderr.isatty()

    def say() -> None:
        while not done.wait(_EVERY_SECONDS):
            seconds = time.monotonic() - started
            LOGGER.info("planning %s for %s: %.0f s", model, cluster, seconds)
            if terminal:
                print(f"\rautopar: planning {model} for {cluster}: {seconds:.0f} s ", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, name="autopar progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if terminal and time.monotonic() - started > _EVERY_SECONDS:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def say_measuring(line: str) -> None:
    """Write a line before, and one after, this machine is measured: as a warning, since somebody waits who sees nothing else."""
    LOGGER.warning("%s", line)


def say_plan(plan: Plan) -> None:
    """Write one line: the model, the plan, and what it is predicted to take."""
    predicted = plan.document.predicted
    step = f", {1e3 * predicted.step_seconds:.3g} ms a step" if predicted.step_seconds else ""
    memory = f", {predicted.peak_memory_bytes / 2**30:.3g} GiB a device" if predicted.peak_memory_bytes else ""
    text = f"{plan.document.model.name} on {plan.document.cluster.name}: {plan.describe()}{step}{memory} (predicted)"
    LOGGER.info("%s", text.replace("\n", " "))
    if limit := plan.document.search.cut_short:
        LOGGER.warning("planning %s was %s", plan.document.model.name, cut_short_text(limit))
