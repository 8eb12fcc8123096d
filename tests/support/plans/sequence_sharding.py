"""Plans that cut the sequence of a whole model on one axis: the planner's own tables without what is not wanted, solved."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Shard
from autopar.ir.plan import Candidate, Precision
from autopar.operations.table import operation
from autopar.rules.registry import default_registry
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.problem.problem import BlockTable, NodeStrategy, Problem, build_problem

AXIS = "tp"
PLAIN = {"exchange": Shard(1), "queries": Shard(2)}
"""Attention on shards without a named function: of heads, after an all-to-all, and of queries."""


def sequence_plan(graph: Graph, size: int, attention: str, cluster: Cluster, data: int = 1) -> Candidate:
    """`attention`: ``ring``, ``rows``, or, with all-to-all before and after it, ``exchange`` and ``heads`` (the function that
    takes key heads that do not divide); ``queries`` where attention itself takes any shard of them. Between blocks ``[B, S, H]``
    is cut along S, and no matrix is cut."""
    mesh = Mesh((Axis(DATA_AXIS, data), Axis(AXIS, size)))
    dtype = next(parameter.value.dtype for parameter in graph.parameters().values() if parameter.trainable)
    problem = build_problem(graph, mesh, cluster, Precision(dtype, dtype), "adamw", default_registry(), (0,))
    made = formulate(_only(problem, mesh.index(AXIS), attention))
    outcome = ilp.solve(made.model)
    assert outcome.values, f"no plan of {graph.name} cuts the sequence by {attention}"
    candidate = Candidate(mesh, decode(made, outcome.values).blocks, graph.batch, Precision(dtype, dtype))
    assert functions(graph, candidate) == {f"ap.attention_{attention}" if attention not in PLAIN else ""}
    return candidate


def functions(graph: Graph, candidate: Candidate) -> set[str]:
    """Of all attention."""
    nodes = {(block.name, node.name): node for block in graph.blocks for node in block.nodes}
    return {each.function for plan in candidate.blocks for each in plan.nodes if _attends(nodes[plan.block, each.node])}


def _attends(node: Node) -> bool:
    return operation(node.op).attention


def _only(problem: Problem, axis: int, attention: str) -> Problem:
    placements = {}
    for number, allowed in problem.placements.items():
        slot = problem.boundary.members[number][0]
        value = problem.boundary.value(slot)
        between = slot.side != "param" and value.differentiable and len(value.shape) == 3
        kept = tuple(at for at in allowed if at[axis] == Shard(1)) if between else ()
        placements[number] = kept or allowed
    blocks = {name: _block(table, axis, attention) for name, table in problem.blocks.items()}
    return replace(problem, placements=placements, blocks=blocks)


def _block(table: BlockTable, axis: int, attention: str) -> BlockTable:
    matrices = {each.value.name for each in table.block.parameters if len(each.value.shape) > 1}
    choices: dict[str, tuple[NodeStrategy, ...]] = {}
    for node in table.block.nodes:
        whole = tuple(
            choice
            for choice in table.strategies[node.name]
            if not any(
                isinstance(at[axis], Shard)
                for name, at in zip(node.operands(), choice.plan.operands, strict=True)
                if name in matrices
            )
        )
        choices[node.name] = tuple(choice for choice in whole if not _attends(node) or _wanted(choice, axis, attention))
    return replace(table, strategies=choices)


def _wanted(choice: NodeStrategy, axis: int, attention: str) -> bool:
    if attention in PLAIN:
        return not choice.plan.function and choice.plan.results[0][axis] == PLAIN[attention]
    return choice.plan.function == f"ap.attention_{attention}"
