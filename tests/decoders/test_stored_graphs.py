"""Shipped captures equal captures; and every kind that the table and the bundled models need is among them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from support.oracles.published_rows import row, table

from autopar.decoders.graphs import kind_of, traced
from autopar.decoders.stored_graphs import stored_graph
from autopar.errors import AutoparError
from autopar.validate.architectures import architecture_of
from autopar.validate.configuration import COMPUTE

REMEDY = "run python tests/benchmarks/store_decoders.py"


def _kinds() -> dict[object, str]:
    found: dict[object, str] = {}
    for each in table().values():
        try:
            found.setdefault((kind_of(architecture_of(each)), COMPUTE[each.precision]), each.id)
        except (AutoparError, KeyError):
            continue
    return found


def test_every_kind_of_the_table_is_stored() -> None:
    missing = [name for (kind, dtype), name in _kinds().items() if stored_graph(kind, dtype) is None]  # type: ignore[misc]
    assert not missing, REMEDY


def test_a_stored_graph_is_the_captured_one() -> None:
    kind = kind_of(architecture_of(row("dg-006")))
    assert stored_graph(kind, "bfloat16") == traced(kind, "bfloat16"), REMEDY


@pytest.mark.slow
def test_every_stored_graph_is_the_captured_one() -> None:
    """Those of the table and of the bundled models, which the script lists that stores them."""
    needed = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/store_decoders.py"))["needed"]()
    for kind, dtype in needed.values():
        assert stored_graph(kind, dtype) == traced(kind, dtype), f"{kind}: {REMEDY}"
