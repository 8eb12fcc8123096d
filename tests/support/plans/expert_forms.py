"""Rules under which experts are dealt in one way alone."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from autopar.ir.graph import Node
from autopar.operations.experts import FUNCTIONS, moe_experts_rule
from autopar.operations.notation.rule import DerivedLine
from autopar.rules.registry import Registry, default_registry

OP = "ap.moe_experts"


def only(form: str) -> Registry:
    """The rules, where experts are dealt in one way alone."""
    registry = default_registry()
    functions = tuple(each for each in FUNCTIONS if each.name == f"{OP}_{form}")
    whole = {"owned": "f", "inside": "e", "dispatched": "f"}[form]

    def line(node: Node, shapes: tuple[tuple[int | str, ...], ...]) -> DerivedLine | None:
        found = moe_experts_rule(node, shapes)
        marked = found.line.replace(f"{whole}+", f"{whole}!").replace("e+", "e!" if form == "dispatched" else "e+")
        return replace(found, line=marked)

    rule = replace(registry.rules[OP], line=line, functions=functions)
    return Registry(MappingProxyType({**registry.rules, OP: rule}))
