"""Pins that cut images along space wherever rules allow it."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.placement import Shard
from autopar.operations.images.space import HALO, OWN
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry


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


def _space(place: object) -> bool:
    return isinstance(place, Shard) and place.dim > 1
