"""Removes operations whose results are never read.

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

from autopar.ir.graph import ancestors
from autopar.passes.base import BlockState, Context


@dataclass(frozen=True, slots=True)
class DeadCode:
    """A sweep from the end. The graph is functional, so an operation without a reader has no effect."""

    name: str = "dead_code"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block = state.block
        return state.with_nodes(ancestors(block.nodes, (*block.outputs, *(value for _, value in block.updates))))
