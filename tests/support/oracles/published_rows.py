"""Rows for tests: the bundled table's, and changes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from autopar.validate.price import Session
from autopar.validate.rows import Row, bundled_table, read_table


@lru_cache(maxsize=1)
def table() -> dict[str, Row]:
    return {row.id: row for row in read_table(bundled_table())}


@lru_cache(maxsize=1)
def session() -> Session:
    """One for all tests: graphs are captured once."""
    return Session()


def row(name: str, **changes: Any) -> Row:
    return replace(table()[name], **changes)
