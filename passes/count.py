"""How many collectives a lowered program runs on model and data axes, state sharding aside: to compare with what really ran."""

from __future__ import annotations

from collections import Counter

from autopar.ir.graph import Node
from autopar.ir.placement import parse_placement
from autopar.passes.base import CONVERT, CONVERT_MANY, START, WAIT, kwarg
from autopar.passes.lowered import Lowered, LoweredBlock
from autopar.rules.conversions import COLLECTIVES, conversion

Key = tuple[str, str, str]
"""(axis, kind, ``forward`` or ``backward``)"""

INSIDE = {"ap.cross_entropy_sharded": 2}
"""All-reduces in the forward of named functions."""


SAVE_NOTHING = frozenset({CONVERT, CONVERT_MANY, START, WAIT, "aten.add.Tensor", "aten.sub.Tensor", "aten.reshape"})
"""Recomputation stops at the last tensor that the backward needs: at the end of a block these are not run again."""


def collectives_of_block(lowered: LoweredBlock) -> Counter[Key]:
    """Of one call of the block. A bucket is one collective each way; what is recomputed runs its forward in the backward, too."""
    out: Counter[Key] = Counter()
    nodes = list(lowered.block.nodes)
    for node in nodes:
        out.update(_of_node(node))
    if lowered.recompute:
        while nodes and nodes[-1].op in SAVE_NOTHING:
            nodes.pop()
    else:
        nodes = [node for node in nodes if lowered.runs_again(node)]
    for node in nodes:
        found = _of_node(node).items()
        out.update(Counter({(axis, kind, "backward"): n for (axis, kind, way), n in found if way == "forward"}))
    return out


def collectives(lowered: Lowered) -> Counter[Key]:
    """Of a whole step."""
    out: Counter[Key] = Counter()
    for call in lowered.calls:
        out.update(collectives_of_block(lowered.block(call.block)))
    return out


def _of_node(node: Node) -> Counter[Key]:
    if node.op in INSIDE:
        return Counter({(kwarg(node, "axis"), "all_reduce", "forward"): INSIDE[node.op]})
    if node.op not in (CONVERT, CONVERT_MANY, START):
        return Counter()
    source, target = (parse_placement(text) for text in kwarg(node, "move").split(" -> "))
    found = conversion(source, target, node.outputs[0].differentiable)
    assert found is not None, f"{node.name}: {source} -> {target}"
    pairs = ((found.forward, "forward"), (found.backward, "backward"))
    return Counter((kwarg(node, "axis"), kind, way) for kind, way in pairs if kind in COLLECTIVES)
