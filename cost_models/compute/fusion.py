"""Which operations of a block a compiler fuses into kernels, and which values stay inside of one: a streaming (pointwise,
reduction) operation's result is written only where another operation needs it (`kernel_accesses` counts what is, `fused_saves`
what the backward saves).
"""

from __future__ import annotations

from autopar.ir.graph import Block, Node
from autopar.operations.table import operation


def is_streaming(node: Node) -> bool:
    """Whether the operation may be fused: no product, lookup, loss or routed experts."""
    record = operation(node.op)
    return record.flops is None and not record.lookup and not record.loss


def values_in_registers(block: Block) -> frozenset[str]:
    """Return the values, and views of them, that streaming operations make and only streaming operations read."""
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
    return frozenset(name for name in made if viewed.get(name, name) not in outside and name not in outside)
