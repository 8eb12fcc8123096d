"""docs/habits.md and the tests have the same rows."""

from __future__ import annotations

import re
from pathlib import Path

from support.harness.habits import PAGE, ROWS


def test_the_page_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) >= 40
    assert all(line for answer, line in ROWS.values() if answer != "right")


def test_each_row_has_its_habit() -> None:
    room = Path(__file__).parent
    texts = [path.read_text() for path in (*room.glob("test_*_habits.py"), *room.parent.glob("variants/test_*.py"))]
    found = [name for text in texts for name in re.findall(r"^def (\w+)\((?:plan|force): str\)", text, re.MULTILINE)]
    assert sorted(found) == sorted(ROWS)
