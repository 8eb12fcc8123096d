"""docs/models.md lists the operations that every rank computes whole, as the table of rules has them."""

from __future__ import annotations

from support.oracles.operation_table import by_nature, section, without_rule, written

from autopar.rules.registry import default_registry


def test_the_section_is_that_of_the_table() -> None:
    assert written() == section(), "write it anew: python tests/support/oracles/operation_table.py"


def test_the_lists_are_of_the_registry() -> None:
    registry = default_registry()
    assert by_nature() and not set(by_nature()) & set(without_rule())
    assert all(registry.rule(f"aten.{name}") is None for name in without_rule())
    assert "linear" not in without_rule() and "conv2d" not in without_rule()
