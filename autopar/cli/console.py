"""The console of commands: tables and text on stdout, or with ``--json`` one JSON document; progress on stderr either way."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from autopar.cli.output import say, writing_output
from autopar.runtime.quantities import seconds_words


class TableConsole(RichConsole):
    """Rich's, but a reader that left is an OSError here too."""

    def on_broken_pipe(self) -> None:
        raise


@dataclass(frozen=True, slots=True)
class Console:
    """The output of a command. With `as_json` tables and text are silent, and `document` prints."""

    as_json: bool = False

    def progress(self, line: str) -> None:
        """One line on stderr, at once."""
        say(line)

    def document(self, data: Any) -> None:
        """Prints the JSON document, with ``--json`` only."""
        if self.as_json:
            with writing_output():
                print(json.dumps(data, indent=2))

    def text(self, text: str) -> None:
        """Prints plain text, without ``--json`` only; on a terminal no line is longer than that is wide."""
        terminal = TableConsole(file=sys.stdout)
        self.code(_wrapped(text, terminal.width) if terminal.is_terminal else text)

    def code(self, text: str) -> None:
        """Prints text as it is, without ``--json`` only."""
        if not self.as_json:
            with writing_output():
                print(text)

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Prints a table, without ``--json`` only. Columns of numbers are right-aligned."""
        if self.as_json:
            return
        rows = [[str(cell) for cell in row] for row in rows]
        table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
        for index, name in enumerate(header):
            numeric = bool(rows) and all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell.replace("[", "\\[") for cell in row))
        terminal = TableConsole(file=sys.stdout)
        if not terminal.is_terminal:
            terminal = TableConsole(file=sys.stdout, width=max(100, terminal.width))
        with writing_output():
            terminal.print(table)


def _wrapped(text: str, width: int) -> str:
    """Long lines at blanks, indented as they begin."""
    out: list[str] = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())][: width // 2]
        out += textwrap.wrap(line, width, subsequent_indent=indent) if len(line) > width else [line]
    return "\n".join(out)


seconds = seconds_words


def size(value: float | None) -> str:
    """``12.3 GiB``."""
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{value:.4g} GiB"


def percent(value: float | None) -> str:
    """``12.3 %``."""
    return "-" if value is None else f"{100 * value:.3g} %" if abs(value) >= 1e-6 else "0 %"
