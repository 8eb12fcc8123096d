"""Pins that cut images along space wherever rules allow it, and rules that leave convolutions no other way."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from autopar.ir.graph import Graph, Node
from autopar.ir.placement import Shard
from autopar.operations.images.space import HALO, OWN
from autopar.operations.notation.rule import DerivedLine, Rule
from autopar.rules.expand import block_strategies
from autopar.rules.registry import Registry, default_registry


def space_pins(graph: Graph, size: int) -> dict[str, dict[str, str]]:
    """The placement on ``tp`` of this size of each result that may be cut along space. Pins are by name, which blocks may
    share: a name counts where all its operations agree."""
    found: dict[str, set[str]] = {}
    for block in graph.blocks:
        offered = block_strategies(
            block, size, batch_axis=False, batch_is_symbolic=graph.batch_is_symbolic, registry=default_registry()
        )
        for node in block.nodes:
            places = {
                str(each.results[0]) for each in offered[node.name] if each.factor in (HALO, OWN) and _space(each.results[0])
            }
            found.setdefault(node.name, set()).update(places or {""})
    return {name: {"tp": text} for name, (text, *more) in ((n, sorted(found[n])) for n in found) if text and not more}


def space_rules() -> Registry:
    """The rules, where input channels stay whole: else a pinned result may be partial sums that are reduced to its shards."""
    registry = default_registry()
    rules = {op: registry.rules[op] for op in registry.rules if op.startswith("aten.conv")}
    whole = {op: replace(rule, line=partial(_whole_channels, rule)) for op, rule in rules.items()}
    return Registry(MappingProxyType({**registry.rules, **whole}))


def _whole_channels(rule: Rule, node: Node, shapes: tuple[tuple[int | str, ...], ...]) -> DerivedLine | None:
    found = rule.derived(node, shapes)
    return None if found is None else replace(found, line=found.line.replace("c+", "c!"))


def _space(place: object) -> bool:
    return isinstance(place, Shard) and place.dim > 1
