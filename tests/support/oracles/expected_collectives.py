"""Oracle: the collectives that a lowered program must run on model and data axes, without those of the sharded state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.ir.dims import Shape, size_at
from autopar.ir.graph import Block, Node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import parse_placement
from autopar.operations.communication import CONVERT, CONVERT_MANY, START, WAIT
from autopar.operations.notation.rule import argument
from autopar.passes.base import text_kwarg
from autopar.passes.lowered import Lowered, LoweredBlock
from autopar.rules.conversions import COLLECTIVES, axis_conversion
from autopar.runtime.ops.attention.ring import ring_of

Key = tuple[str, str, str]
"""(axis, kind, ``forward`` or ``backward``)"""

_EXPERT_EXCHANGES = (("all_to_all", "forward", 4), ("all_to_all", "backward", 3))
INSIDE_FUNCTIONS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "ap.cross_entropy_sharded": (("all_reduce", "forward", 2),),
    "ap.logsumexp_sharded": (("all_reduce", "forward", 2),),
    "ap.token_log_probs_sharded": (("all_reduce", "forward", 2),),
    "ap.moe_experts_dispatched": _EXPERT_EXCHANGES,
    "ap.moe_experts_start": _EXPERT_EXCHANGES,
}
"""Collectives inside named functions. Expert dispatch exchanges token counts, tokens, router weights and results; the backward
exchanges the gradients of all but the counts."""


SAVE_NOTHING = frozenset({CONVERT, CONVERT_MANY, START, WAIT, "aten.add.Tensor", "aten.sub.Tensor", "aten.reshape"})
"""Operations that save nothing. Checkpointing stops at the last saved tensor: at a block's end these are not recomputed."""


def collectives_of_block(lowered: LoweredBlock, mesh: Mesh) -> Counter[Key]:
    """Of one call of the block. A bucket is one collective in each direction; a recomputed node runs its forward collectives in
    the backward too."""
    out: Counter[Key] = Counter()
    nodes = list(lowered.block.nodes)
    for node in nodes:
        out.update(_of_node(node, mesh, lowered.block))
    if lowered.recompute:
        while nodes and nodes[-1].op in SAVE_NOTHING:
            nodes.pop()
    else:
        nodes = [node for node in nodes if lowered.recomputes(node)]
    for node in nodes:
        found = _of_node(node, mesh, lowered.block).items()
        out.update(Counter({(axis, kind, "backward"): n for (axis, kind, way), n in found if way == "forward"}))
    return out


def collectives(lowered: Lowered) -> Counter[Key]:
    """Of one training step."""
    out: Counter[Key] = Counter()
    for call in lowered.graph.calls:
        out.update(collectives_of_block(lowered.block(call.block), lowered.candidate.mesh))
    return out


def _ring(node: Node, size: int, shapes: Mapping[str, Shape]) -> tuple[tuple[str, str, int], ...]:
    """Keys and values go once around the ring, their gradients once more; a zigzag layout exchanges halves before and after."""
    operands = [shapes[name] for name in node.operands()]
    queries, keys = (size_at(shape[-2], 1) for shape in operands[:2])
    causal, window = bool(argument(node, 5, "is_causal", False)), argument(node, 99, "window")
    rows = len(operands) > 3 and len(operands[3]) > 1 and operands[3][-2] != 1
    ring = ring_of(size, 0, "", queries, keys, causal, window, rows)  # type: ignore[arg-type]
    steps, halves = len(ring.steps()), 2 * ring.zigzag
    return ("all_to_all", "forward", steps + halves), ("all_to_all", "backward", 2 * steps + halves)


def _of_node(node: Node, mesh: Mesh, block: Block) -> Counter[Key]:
    if node.op == "ap.attention_ring":
        axis, shapes = text_kwarg(node, "axis"), {name: value.shape for name, value in block.values().items()}
        return Counter({(axis, kind, way): count for kind, way, count in _ring(node, mesh.size_of(axis), shapes)})
    if node.op in INSIDE_FUNCTIONS:
        return Counter({(text_kwarg(node, "axis"), kind, way): count for kind, way, count in INSIDE_FUNCTIONS[node.op]})
    if node.op not in (CONVERT, CONVERT_MANY, START):
        return Counter()
    source, target = (parse_placement(text) for text in text_kwarg(node, "conversion").split(" -> "))
    found = axis_conversion(source, target, node.outputs[0].differentiable)
    assert found is not None, f"{node.name}: {source} -> {target}"
    pairs = ((found.forward, "forward"), (found.backward, "backward"))
    return Counter((text_kwarg(node, "axis"), kind, way) for kind, way in pairs if kind in COLLECTIVES)
