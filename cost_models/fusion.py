"""What a compiler saves of memory traffic: neighbouring streaming operations run as one kernel.

Between operations of one kernel values stay in registers: what a streaming operation makes is read again for free by other
streaming operations, and is written only where something else needs it. In the backward the same holds for gradients, and what
such an operation would keep is computed again from what enters the kernel (as torch's compiler does: min-cut partitioning).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.compute import Profile
from autopar.cost_models.flops import FLOPS, LOOKUPS, VIEWS, packet
from autopar.ir.graph import Block, Node

_ALONE = frozenset(["ap.cross_entropy_sum", "ap.cross_entropy_in_place", "ap.moe_experts", "ap.experts", "ap.experts_float8"])


@dataclass(frozen=True, slots=True)
class Fusable:
    """Values by name: `made` by a streaming operation, and those of them that `only` streaming operations read."""

    made: frozenset[str]
    only: frozenset[str]


def streams(node: Node) -> bool:
    """Whether the operation is neither a product, nor a lookup, nor one that runs by itself."""
    op = packet(node.op)
    return op not in FLOPS and op not in LOOKUPS and op not in _ALONE


def fusable(block: Block) -> Fusable:
    """Views hand on what they view."""
    made: set[str] = set()
    outside = set(block.outputs) | {name for _, name in block.updates}
    viewed: dict[str, str] = {}
    for node in block.nodes:
        operands = node.operands()
        if packet(node.op) in VIEWS and operands:
            for value in node.outputs:
                viewed[value.name] = viewed.get(operands[0], operands[0])
                if operands[0] in made:
                    made.add(value.name)
        elif streams(node):
            made.update(value.name for value in node.outputs)
        else:
            outside.update(operands)
    outside |= {viewed[name] for name in outside if name in viewed}
    roots = {name for name in made if viewed.get(name, name) not in outside and name not in outside}
    return Fusable(frozenset(made), frozenset(roots))


def fused(node: Node, known: Profile, among: Fusable) -> Profile:
    """The profile of a node whose neighbours share its kernel."""
    if not streams(node) or packet(node.op) in VIEWS:
        return known
    inside = [name in among.made for name in node.operands()]
    within = [value.name in among.only for value in node.outputs]

    def left(counts: tuple[float, ...], free: list[bool]) -> tuple[float, ...]:
        return tuple(0.0 if gone else count for count, gone in zip(counts, free, strict=True))

    quiet = all(inside) and all(within)
    return replace(
        known,
        forward_operands=left(known.forward_operands, inside),
        forward_results=left(known.forward_results, within),
        backward_operands=left(known.backward_operands, inside),
        backward_results=left(known.backward_results, within),
        kernels=(0, 0) if quiet else known.kernels,
    )
