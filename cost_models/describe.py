"""The names that a reader gives to a candidate. Read off the placements; nothing in the program depends on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autopar.cost_models.flops import packet
from autopar.ir.graph import Block, Graph, Node
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Partial, Placement, Placements, Shard
from autopar.ir.plan import BlockPlan, Candidate, NodePlan

_LINEAR = frozenset({"aten.linear", "ap.linear_kn", "aten.mm", "aten.addmm", "aten.matmul"})
_ATTENTION = "aten.scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Description:
    """Degrees in the words of the trade, and a sentence. An axis that cuts the queries' sequence in attention is counted as
    context parallel, every other model axis as tensor parallel; `zero` is the stage of most parameters."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    zero: int
    virtual_stages: int
    words: str


def describe(graph: Graph, candidate: Candidate) -> Description:
    """Names what the placements of `candidate` amount to."""
    mesh = candidate.mesh
    degrees = {"tp": 1, "cp": 1}
    words = [f"data parallel {mesh.size_of(DATA_AXIS)}", *_state_words(graph, candidate)]
    for axis, (name, size) in enumerate(zip(mesh.names, mesh.sizes, strict=True)):
        if name == DATA_AXIS or size == 1:
            continue
        features = Counter(feature for block in graph.blocks for feature in _features(block, candidate.block(block.name), axis))
        degrees["cp" if features["sequence-sharded attention"] and not features["heads sharded"] else "tp"] *= size
        words.append(f"{name} {size}: " + (", ".join(sorted(features, key=_ORDER.index)) or "everything computed on every rank"))
    return Description(
        mesh.size_of(DATA_AXIS), degrees["tp"], 1, degrees["cp"], 1, main_zero(graph, candidate), 1, "; ".join(words)
    )


_ORDER = (
    "column-parallel linears",
    "row-parallel linears",
    "token-parallel linears",
    "heads sharded",
    "sequence-sharded attention",
    "vocabulary-parallel embedding",
    "vocabulary-parallel loss",
    "sequence-sharded residual stream",
    "hidden-sharded residual stream",
    "replicated residual stream",
)


def _features(block: Block, plan: BlockPlan, axis: int) -> Iterator[str]:
    nodes = {node.name: node for node in block.nodes}
    for node_plan in plan.nodes:
        found = _node_feature(nodes[node_plan.node], node_plan, axis)
        if found:
            yield found
    stream = next((at for value, at in zip(block.inputs, plan.inputs, strict=True) if value.differentiable), None)
    if stream is not None and any(packet(node.op) in _LINEAR for node in block.nodes):
        yield _stream_feature(stream[axis])


def _stream_feature(placement: Placement) -> str:
    if not isinstance(placement, Shard):
        return "replicated residual stream"
    return "sequence-sharded residual stream" if placement.dim == 1 else "hidden-sharded residual stream"


def _node_feature(node: Node, plan: NodePlan, axis: int) -> str:
    operands = [placements[axis] for placements in plan.operands]
    results = [placements[axis] for placements in plan.results]
    op = packet(node.op)
    if op in _LINEAR:
        if isinstance(results[0], Partial) and isinstance(operands[0], Shard):
            return "row-parallel linears"
        if isinstance(operands[1], Shard):
            return "column-parallel linears"
        return "token-parallel linears" if isinstance(operands[0], Shard) else ""
    if op == _ATTENTION and isinstance(operands[0], Shard):
        return {1: "heads sharded", 2: "sequence-sharded attention"}.get(operands[0].dim, "")
    return {
        "ap.embedding_sharded": "vocabulary-parallel embedding",
        "ap.cross_entropy_sharded": "vocabulary-parallel loss",
    }.get(plan.function if operands and isinstance(operands[0], Shard) else "", "")


def _state_of(graph: Graph, candidate: Candidate) -> dict[int, int]:
    """Parameters (on one rank of the model axes, all calls) by ZeRO stage."""
    out: dict[int, int] = {}
    counts = Counter(call.block for call in graph.calls)
    for block in graph.blocks:
        plan = candidate.block(block.name)
        size = sum(
            prod(dim for dim in parameter.value.shape if isinstance(dim, int)) // _cuts(placements, candidate)
            for parameter, placements in zip(block.parameters, plan.parameters, strict=True)
            if not parameter.buffer
        )
        if size:
            out[plan.zero] = out.get(plan.zero, 0) + size * counts[block.name]
    return out


def _cuts(placements: Placements, candidate: Candidate) -> int:
    return prod(size for place, size in zip(placements, candidate.mesh.sizes, strict=True) if isinstance(place, Shard))


def main_zero(graph: Graph, candidate: Candidate) -> int:
    """The ZeRO stage of most parameters."""
    state = _state_of(graph, candidate)
    return max(state, key=state.__getitem__, default=0)


def _state_words(graph: Graph, candidate: Candidate) -> Iterator[str]:
    if candidate.mesh.size_of(DATA_AXIS) == 1:
        return
    state = _state_of(graph, candidate)
    total = sum(state.values())
    for zero, size in sorted(state.items(), reverse=True):
        name = f"ZeRO-{zero}" if zero else "replicated parameters"
        yield name if len(state) == 1 else f"{name} for {size / total:.0%} of the parameters"
