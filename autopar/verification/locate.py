"""The place where two runs depart first: the program returns the outputs of its modules too, compared in order of execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir import dims
from autopar.ir.graph import Block, Call, Graph, Node
from autopar.ir.interface import Output
from autopar.ir.plan import BlockPlan, Candidate
from autopar.verification.differences import Difference, relative

SEEN = "seen_"


@dataclass(frozen=True, slots=True)
class Watch:
    """A module's output: the result of the program that has it, and its line."""

    module: str
    result: str
    source: str


def with_module_outputs(
    graph: Graph, candidate: Candidate, shapes: Mapping[str, torch.Size]
) -> tuple[Graph, Candidate, list[Watch]]:
    """The graph and candidate with the outputs of modules as further results, in order of execution. `shapes` are those that the
    modules give, by path; one whose last operation gives another shape is left out."""
    watched = {block.name: _module_ends(block) for block in graph.blocks}
    calls: list[Call] = []
    ends: dict[str, Watch] = {}
    for number, call in enumerate(graph.calls):
        names = []
        parts = call.prefix.split(".")
        for depth in range(len(parts)):  # a module around this one does not end before it
            ends.pop(".".join(parts[:depth]), None)
        for path, node in watched[call.block].items():
            result = f"{SEEN}{number}_{node.name}"
            names.append(result)
            module = ".".join(filter(None, (call.prefix, path)))
            ends.pop(module, None)
            if module in shapes and tuple(shapes[module]) == tuple(dims.shape_at(node.outputs[0].shape, graph.batch)):
                ends[module] = Watch(module, result, node.source)
        calls.append(replace(call, outputs=(*call.outputs, *dict.fromkeys(names))))
    blocks = tuple(_with_outputs(block, watched[block.name].values()) for block in graph.blocks)
    plans = tuple(_with_placements(plan, watched[plan.block].values()) for plan in candidate.blocks)
    results = dict.fromkeys(watch.result for watch in ends.values())
    outputs = (*graph.outputs, *(Output(result, result, "full") for result in results))
    graph = replace(graph, blocks=blocks, calls=tuple(calls), outputs=outputs)
    return graph, replace(candidate, blocks=plans), list(ends.values())


def _module_ends(block: Block) -> dict[str, Node]:
    """The last node of each module of a block by its path, in order of execution; that of an inner module comes first."""
    last: dict[str, tuple[int, Node]] = {}
    for number, node in enumerate(block.nodes):
        parts = node.module.split(".") if node.module else []
        for depth in range(len(parts) + 1):
            last[".".join(parts[:depth])] = (number, node)
    if not block.nodes:
        return {}
    ordered = sorted(last.items(), key=lambda item: (item[1][0], -len(item[0])))
    return {path: node for path, (_, node) in ordered}


def _with_outputs(block: Block, nodes: Iterable[Node]) -> Block:
    return replace(block, outputs=(*block.outputs, *dict.fromkeys(node.name for node in nodes)))


def _with_placements(plan: BlockPlan, nodes: Iterable[Node]) -> BlockPlan:
    results = {each.node: each.results[0] for each in plan.nodes}
    return replace(plan, outputs=(*plan.outputs, *(results[name] for name in dict.fromkeys(node.name for node in nodes))))


def first_output(watches: Sequence[Watch], reference: Mapping[str, Tensor], program: Mapping[str, Tensor], allowed: float) -> str:
    """The first module whose output departs by more than is allowed; empty where there is none."""
    for watch in watches:
        there = program.get(watch.result)
        size = 0.0 if there is None else relative(reference[watch.module], there)
        if size > allowed:
            line = f" ({watch.source})" if watch.source else ""
            return f"the output of {watch.module}{line} is the first that departs, by {size:.1e}"
    return ""


def first_gradient(differences: Sequence[Difference], modules: Sequence[str]) -> str:
    """The module that the backward reaches first among those whose gradients depart."""
    order = {path: number for number, path in enumerate(modules)}
    wrong = [each for each in differences if each.what == "gradients" and not each.equal]
    if not wrong:
        worst = max(differences, key=lambda each: each.relative)
        return f"{worst.what}: {worst.name} departs, by {worst.relative:.1e}"
    first = max(wrong, key=lambda each: order.get(each.name.rpartition(".")[0], -1))
    return (
        f"the gradient of {first.name} is the first in the backward that departs, by {first.relative:.1e}; "
        "the outputs of all modules agree"
    )
