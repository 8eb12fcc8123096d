"""Memory traffic that a compiler's fusion of neighbouring streaming (pointwise, reduction) operations into one kernel saves.

Within a fused kernel values stay in registers: the result of a streaming operation is read for free by other streaming
operations, and is written only where another operation needs it. In the backward the same holds for gradients, and tensors that
such an operation would save are recomputed from the inputs of the kernel (as torch's compiler does: min-cut partitioning).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.compute.operations import Profile
from autopar.ir.graph import Block, Node
from autopar.operations.notation.rule import argument
from autopar.operations.table import operation


@dataclass(frozen=True, slots=True)
class FusableValues:
    """Values by name: `made` by a streaming operation, and those of them that `only` streaming operations read."""

    made: frozenset[str]
    only: frozenset[str]


def is_streaming(node: Node) -> bool:
    """Whether the operation may be fused: no product, lookup, loss or routed experts."""
    record = operation(node.op)
    return record.flops is None and not record.lookup and not record.loss


def is_traced(block: Block) -> bool:
    """Return whether torch.compile makes one graph of the block: no operation is sized by data."""
    return not any(operation(node.op).untraced for node in block.nodes)


def fusable_values(block: Block) -> FusableValues:
    """Return the fusable values of a block; a view counts as the value that it views."""
    made: set[str] = set()
    outside = set(block.outputs) | {name for _, name in block.updates}
    viewed: dict[str, str] = {}
    for node in block.nodes:
        operands = node.operands()
        if operation(node.op).view and operands:
            for value in node.outputs:
                viewed[value.name] = viewed.get(operands[0], operands[0])
                if operands[0] in made:
                    made.add(value.name)
        elif is_streaming(node):
            made.update(value.name for value in node.outputs)
        else:
            outside.update(operands)
    outside |= {viewed[name] for name in outside if name in viewed}
    roots = {name for name in made if viewed.get(name, name) not in outside and name not in outside}
    return FusableValues(frozenset(made), frozenset(roots))


def fused_profile(node: Node, known: Profile, among: FusableValues) -> Profile:
    """The profile of a node that is fused with its neighbours: traffic within the kernel is free."""
    if operation(node.op).attention and argument(node, 4, "dropout_p", 0.0):
        # the backward computes it again, from its seed (`runtime.ops.attention.dropout`)
        return replace(known, backward_flops=known.backward_flops + known.forward_flops)
    if not is_streaming(node) or operation(node.op).view:
        return known
    inside = [name in among.made for name in node.operands()]
    within = [value.name in among.only for value in node.outputs]

    def remaining(counts: tuple[float, ...], free: list[bool]) -> tuple[float, ...]:
        return tuple(0.0 if gone else count for count, gone in zip(counts, free, strict=True))

    no_traffic = all(inside) and all(within)
    return replace(
        known,
        forward_operands=remaining(known.forward_operands, inside),
        forward_results=remaining(known.forward_results, within),
        backward_operands=remaining(known.backward_operands, inside),
        backward_results=remaining(known.backward_results, within),
        kernels=(0, 0) if no_traffic else known.kernels,
    )
