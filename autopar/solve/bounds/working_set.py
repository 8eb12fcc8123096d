"""The least bytes that the backward of a call holds beside saved tensors, whatever its placements."""

from __future__ import annotations

from heapq import nlargest

from autopar.cost_models.step.block_memory import backward_working_bytes
from autopar.ir.graph import Node
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import BlockTable, Problem

_NODES = 6
"""Operations of a block that are looked at: those with the largest tensors."""


def least_working_bytes(problem: Problem, name: str) -> float:
    """The largest working set of an operation's backward, under the strategy with the least, and the gradients of the block's
    inputs at their smallest placements (`block_memory`)."""
    table = problem.blocks[name]
    nodes = nlargest(_NODES, table.block.nodes, key=lambda node: _whole_bytes(table, node))
    return max(
        (min(backward_working_bytes(table.costs, each.plan) for each in table.strategies[node.name]) for node in nodes),
        default=0.0,
    ) + _least_input_gradients(problem, table)


def _whole_bytes(table: BlockTable, node: Node) -> float:
    profile = table.costs.profile(node.name)
    return sum(profile.operand_bytes) + sum(profile.result_bytes)


def _least_input_gradients(problem: Problem, table: BlockTable) -> float:
    out = 0.0
    for index, value in enumerate(table.block.inputs):
        number = problem.boundary.classes.get(Slot(table.block.name, "in", index))
        if value.differentiable and number is not None:
            out += min(table.costs.value_bytes(value.name, at) for at in problem.placements[number])
    return out
