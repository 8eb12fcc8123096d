"""A block whose calls may have two plans: the first calls of it one, the others another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.ir.plan import BlockPlan
from autopar.solve.problem.boundary import BlockBoundaries, Slot
from autopar.solve.problem.problem import Problem

_SECOND = "~"
"""What the name of the second part ends with: no block is called so."""


def with_split_calls(problem: Problem, firsts: Mapping[str, int]) -> Problem:
    """Return the problem with the calls of some blocks in two parts, each of which has a plan of its own: so many of its first
    calls, and the others."""
    graph, blocks, original = _split_graph(problem.graph, firsts), dict(problem.blocks), {}
    for name in firsts:
        table = problem.blocks[name]
        second = replace(table.block, name=name + _SECOND)
        blocks[second.name] = replace(table, block=second)
        original[second.name] = name
    boundary, placements = BlockBoundaries(graph), {}
    for slot, number in boundary.classes.items():
        whole = problem.boundary.classes[replace(slot, block=original.get(slot.block, slot.block))]
        placements[number] = problem.placements[whole]
    return replace(problem, graph=graph, boundary=boundary, blocks=blocks, placements=placements)


def _split_graph(graph: Graph, firsts: Mapping[str, int]) -> Graph:
    seen, calls = dict.fromkeys(firsts, 0), []
    for call in graph.calls:
        if call.block in seen:
            seen[call.block] += 1
            if seen[call.block] > firsts[call.block]:
                call = replace(call, block=call.block + _SECOND)
        calls.append(call)
    seconds = (replace(graph.block(name), name=name + _SECOND) for name in firsts)
    return replace(graph, blocks=(*graph.blocks, *seconds), calls=tuple(calls))
