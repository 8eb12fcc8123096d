"""Rules under which experts are dealt in one way alone, and programs of small mixtures that follow them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import MappingProxyType

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Node
from autopar.ir.plan import Precision
from autopar.operations.experts import FUNCTIONS, moe_experts_rule
from autopar.operations.notation.rule import DerivedLine
from autopar.rules.registry import Registry, default_registry
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from support.harness.end_to_end import Prepared, program

OP = "ap.moe_experts"
FORMS = {
    "owned, tp=4": ("owned", {"tp": 4}),
    "owned, dp=2,tp=2": ("owned", {"dp": 2, "tp": 2}),
    "inside, dp=2,tp=2": ("inside", {"dp": 2, "tp": 2, "zero": 3}),
    "dispatched, ep=2": ("dispatched", {"dp": 1, "ep": 2}),
    "dispatched, ep=4": ("dispatched", {"ep": 4}),
    "dispatched, dp=2,ep=2": ("dispatched", {"dp": 2, "ep": 2, "zero": 3}),
    "dispatched, ep=2,tp=2": ("dispatched", {"dp": 1, "ep": 2, "tp": 2}),
    "dispatched, in micro-batches": ("dispatched", {"dp": 2, "ep": 2, "micro": 4}),
}


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


def result_of(prepared: Prepared, name: str, **further: int) -> PlanResult:
    """The plan of this form, with further degrees."""
    form, force = FORMS[name][0], FORMS[name][1] | further
    pins = {}
    if form == "dispatched":  # the experts' matrices are cut; then tokens are, too, or the matrices come together
        places = {"ep": "S(0)"} | ({"tp": "I"} if "tp" in force else {})
        matrices = [p.value.name for block in prepared.graph.blocks for p in block.parameters if len(p.value.shape) == 3]
        pins = dict.fromkeys(matrices, places)
    precision = Precision("float64", "float64")
    options = SearchOptions(batch=16, precision=precision, force={"pp": 1, **force}, pins=pins, registry=only(form))
    size = prod(force.get(axis, 1) for axis in ("dp", "ep", "tp"))
    result = search(prepared.graph, Cluster.parse(f"local:{size}"), options)
    assert not result.warnings, result.warnings
    return result


def text_of(prepared: Prepared, name: str, **further: int) -> str:
    """The text of a program of this form, with further degrees."""
    text, form = program(prepared, result_of(prepared, name, **further)), FORMS[name][0]
    calls = {"owned": ["_owned"], "inside": [""], "dispatched": ["_dispatched", "_start"]}[form]
    assert any(f"C.moe_experts{call}(" in text for call in calls), text
    return text
