"""Blocks whose calls have several plans, by pipeline stage or among equal layers: a block for each, ``Layer`` and ``Layer_2``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import Block, Call, Graph
from autopar.ir.plan import BlockPlan


def with_stage_variants(graph: Graph, plans: Sequence[BlockPlan]) -> tuple[Graph, tuple[BlockPlan, ...], dict[str, str]]:
    """`plans` are those of each call. The graph with a block for each distinct plan, the plans of its blocks, and the original
    block of each. The plan that most calls have keeps the block's name."""
    taken = {block.name for block in graph.blocks}
    names: dict[BlockPlan, str] = {}
    blocks: list[Block] = []
    out: list[BlockPlan] = []
    originals: dict[str, str] = {}
    for block in graph.blocks:
        uses = Counter(plan for call, plan in zip(graph.calls, plans, strict=True) if call.block == block.name)
        for number, (plan, _) in enumerate(uses.most_common(), 1):
            name = block.name if number == 1 else _free(f"{block.name}_{number}", taken)
            names[plan] = name
            blocks.append(replace(block, name=name))
            out.append(replace(plan, block=name))
            originals[name] = block.name
    calls: list[Call] = [replace(call, block=names[plan]) for call, plan in zip(graph.calls, plans, strict=True)]
    return replace(graph, blocks=tuple(blocks), calls=tuple(calls)), tuple(out), originals


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def without_stage_variants(graph: Graph) -> Graph:
    """The inverse: blocks that differ by name alone are one again."""
    first: dict[Block, str] = {}
    names = {block.name: first.setdefault(replace(block, name=""), block.name) for block in graph.blocks}
    blocks = tuple(block for block in graph.blocks if names[block.name] == block.name)
    return replace(graph, blocks=blocks, calls=tuple(replace(call, block=names[call.block]) for call in graph.calls))


def with_variants_like(graph: Graph, other: Graph) -> Graph:
    """`graph` with a block for each variant that `other` has, whose calls are the same ones in the same order. A graph that is
    not so related is returned as it is."""
    names = [call.block for call in other.calls]
    if len(names) != len(graph.calls):
        return graph
    of: dict[str, str] = {}
    for call, name in zip(graph.calls, names, strict=True):
        if of.setdefault(name, call.block) != call.block:
            return graph
    blocks = tuple(replace(graph.block(of[block.name]), name=block.name) for block in other.blocks if block.name in of)
    return replace(graph, blocks=blocks, calls=tuple(replace(c, block=name) for c, name in zip(graph.calls, names, strict=True)))
