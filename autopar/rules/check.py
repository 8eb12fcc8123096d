"""Checks that every operation of a candidate is placed as its rule allows, so that a plan edited by hand computes the same."""

from __future__ import annotations

from itertools import product

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.placement import format_placements
from autopar.ir.plan import Candidate
from autopar.rules.expand import block_strategies
from autopar.rules.loss_chunks import check_chunks, plain_function
from autopar.rules.registry import Registry


def check_strategies(graph: Graph, candidate: Candidate, registry: Registry) -> None:
    """PlanError for the first operation whose operands, results and function are not a strategy of its rule on every axis."""
    for block in graph.blocks:
        plans = {plan.node: plan for plan in candidate.block(block.name).nodes}
        check_chunks(block, plans)
        allowed = [
            block_strategies(
                block,
                axis.size,
                batch_axis=axis.name == DATA_AXIS,
                batch_is_symbolic=graph.batch_is_symbolic,
                registry=registry,
                any_size=axis.name == EXPERT_AXIS,
            )
            for axis in candidate.mesh.axes
        ]
        for node in block.nodes:
            plan = plans[node.name]
            choices: list[set[str]] = []
            for index, strategies in enumerate(allowed):
                if candidate.mesh.axes[index].size == 1:  # every placement is the whole tensor
                    continue
                operands = tuple(placements[index] for placements in plan.operands)
                results = tuple(placements[index] for placements in plan.results)
                fitting = [each for each in strategies[node.name] if (each.operands, each.results) == (operands, results)]
                if not fitting:
                    raise PlanError(
                        f"block {block.name}, {node.name}: {node.op} cannot take ({format_placements(operands)}) to "
                        f"({format_placements(results)}) on axis {candidate.mesh.axes[index].name}; plan the model again"
                    )
                choices.append({each.function for each in fitting})
            if plain_function(plan.function) not in {"".join(each) for each in product(*choices)}:
                raise PlanError(f"block {block.name}, {node.name}: {plan.function!r} does not compute {node.op} as placed")
