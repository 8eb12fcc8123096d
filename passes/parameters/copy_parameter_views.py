"""Copies outputs of a block that share storage with its parameters, which FSDP2 frees after the block's forward.

Before (a class token)::

    %tokens = aten.expand(%token, [B, 1, 32])
    return %tokens

After::

    %tokens = aten.expand(%token, [B, 1, 32])
    %tokens_copy = aten.clone(%tokens)
    return %tokens_copy
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Block, Node, Ref
from autopar.operations.pointwise import CLONE
from autopar.operations.table import operation
from autopar.passes.base import BlockState, Context, fresh_name


@dataclass(frozen=True, slots=True)
class CopyParameterViews:
    """Where parameters are sharded over data ranks (ZeRO): elsewhere their storage stays."""

    name: str = "copy_parameter_views"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block = state.block
        shared = _shared_with_parameters(block)
        copied = [name for name in dict.fromkeys(block.outputs) if name in shared]
        if not copied or not context.plan.zero:
            return state
        values, placements, taken = block.values(), dict(state.placements), set(block.values())
        nodes, renamed = list(block.nodes), dict[str, str]()
        for name in copied:
            copy = replace(values[name], name=fresh_name(f"{name}_copy", taken))
            renamed[name], placements[copy.name] = copy.name, placements[name]
            nodes.append(Node(CLONE, (Ref(name),), (), (copy,)))
        outputs = tuple(renamed.get(name, name) for name in block.outputs)
        return replace(state, block=replace(block, nodes=tuple(nodes), outputs=outputs), placements=placements)


def _shared_with_parameters(block: Block) -> set[str]:
    """Values that may share storage with a parameter."""
    shared = {parameter.value.name for parameter in block.parameters if not parameter.buffer}
    for node in block.nodes:
        operands = node.operands()
        if operands and operands[0] in shared and operation(node.op).shares_storage:
            shared.update(value.name for value in node.outputs)
    return shared
