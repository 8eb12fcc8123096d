"""Work of more than two seconds says what it does and how far it is: by a bar of rich in a terminal or a notebook, else by lines
of the logger ``autopar``. Of several ranks the first one says it.

`working` surrounds the work, and `advance` is called from inside, however deep. A thread of its own draws, so that the work
itself neither waits nor prints.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

LOGGER = logging.getLogger("autopar")

QUIET_SECONDS = 2.0
"""Work that ends before says nothing."""

LINE_SECONDS, BAR_SECONDS = 5.0, 0.25
"""From one line, or drawing of the bar, to the next."""

_LONGEST = 100


@dataclass(eq=False)
class Work:
    """Work that is being done: `done` of `total` (0: unknown how much), and in `detail` what of it. `inside` is the part of it
    that says what it does itself."""

    what: str
    total: float = 0.0
    done: float = 0.0
    detail: str = ""
    inside: Work | None = None
    began: float = field(default_factory=time.monotonic)

    def words(self) -> str:
        """Return what is done, in one line."""
        return " ".join(f"{self.what}: {self.detail}".split()).removesuffix(":")[:_LONGEST]

    def line(self, seconds: float) -> str:
        """Return what is done, how far it is, and since when."""
        share = f", {100 * min(1.0, self.done / self.total):.0f} %" if self.total else ""
        return f"{self.words()}{share}, {seconds:.0f} s"

    @property
    def innermost(self) -> Work:
        return self if self.inside is None else self.inside.innermost


_CURRENT: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def working(what: str, total: float = 0.0, say: Callable[[str], object] | None = None) -> Iterator[Work]:
    """Show the work inside once it takes long. Work inside of other work is shown in that one's place. `say` gets the lines where
    there is no bar."""
    outer, work, ended = _CURRENT.get(), Work(what, total), threading.Event()
    token = _CURRENT.set(work)
    thread = None
    if outer is not None:
        outer.inside = work
    elif os.environ.get("RANK", "0") in ("", "0"):
        shown = (work, ended, _bar(), say or LOGGER.info)
        thread = threading.Thread(target=_show, args=shown, name="autopar progress", daemon=True)
        thread.start()
    try:
        yield work
    finally:
        _CURRENT.reset(token)
        ended.set()
        if outer is not None:
            outer.inside = None
        if thread is not None:
            thread.join()


def advance(amount: float = 1.0, detail: str = "") -> None:
    """Say that so much more of the work around is done, and what is next."""
    work = _CURRENT.get()
    if work is not None:
        work.done += amount
        work.detail = detail or work.detail


def tell(detail: str, share: float) -> None:
    """Say what is next of the work around, and which share of it is done."""
    work = _CURRENT.get()
    if work is not None:
        work.detail, work.done = detail, share * work.total


def _show(work: Work, ended: threading.Event, bar: Any, say: Callable[[str], object]) -> None:
    if ended.wait(QUIET_SECONDS):
        return
    if bar is None:
        while True:
            say(work.innermost.line(time.monotonic() - work.began))
            if ended.wait(LINE_SECONDS):
                return
    with bar:
        task = bar.add_task("", total=None)
        bar.tasks[0].start_time = bar.get_time() - (time.monotonic() - work.began)
        while True:
            now = work.innermost
            bar.update(task, description=now.words(), completed=now.done, total=now.total or None, refresh=True)
            if ended.wait(BAR_SECONDS):
                return


def _bar() -> Any:
    """Return a bar of rich, or None where it has nowhere to draw or is not installed (an exported program runs without it)."""
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None
    if not notebook and not sys.stderr.isatty():
        return None
    state = random.getstate()  # rich draws from Python's generator when it is imported, which is the user's
    try:
        shown: Any = import_module("rich.progress")
        console = import_module("rich.console").Console(stderr=True)
    except ImportError:
        return None
    finally:
        random.setstate(state)
    columns = (
        shown.TextColumn("autopar: {task.description}", markup=False),
        shown.BarColumn(),
        shown.TaskProgressColumn(),
        shown.TimeElapsedColumn(),
    )
    settings = {"transient": True, "auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
    return shown.Progress(*columns, console=console, **settings)
