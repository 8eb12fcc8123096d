"""Operations whose results nobody reads go.

Before::

    %a = aten.neg(%x)
    %b = aten.abs(%x)
    return %b

After::

    %b = aten.abs(%x)
    return %b
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Node
from autopar.passes.base import Context, Stage


@dataclass(frozen=True, slots=True)
class DeadCode:
    """One sweep from the end: the program is functional, so what is not read has no effect."""

    name: str = "dead_code"

    def run(self, stage: Stage, context: Context) -> Stage:
        block = stage.block
        live = {*block.outputs, *(value for _, value in block.updates)}
        kept: list[Node] = []
        for node in reversed(block.nodes):
            if any(value.name in live for value in node.outputs):
                live.update(node.operands())
                kept.append(node)
        return stage.with_nodes(kept[::-1])
