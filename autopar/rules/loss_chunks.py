"""Losses in chunks of tokens: the head of a model and the cross entropy of its logits as one function without whole logits.

The graph stays as it was captured. The operations of a chain ``linear -> casts -> cross_entropy_sum``, where nothing else reads
what is between them, have each strategy twice: as it is, and by a function of `operations.losses` (`with_chunks`). A plan takes
the latter for all of a chain or for none (`chunk_pairs`, `check_chunks`); then the pass `ChunkLosses` writes the chain as one
call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from autopar.errors import PlanError
from autopar.ir.graph import Block, Node
from autopar.ir.placement import Partial
from autopar.ir.plan import NodePlan
from autopar.operations.losses import CROSS_ENTROPY, IN_CHUNKS, WITHIN_LOSS, runs_in_chunks
from autopar.operations.pointwise import CAST
from autopar.operations.products import LINEAR

Chain = tuple[Node, ...]
"""A head, casts of its result, and the loss."""
_COMPUTED_IN = {"bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""The dtype of the loss for each of the head; without float16, in which sums over tokens may overflow: gradients are made before
the loss is scaled, or divided by a count."""


def loss_chains(block: Block) -> tuple[Chain, ...]:
    """Return the chains of a block."""
    reads = Counter(name for node in block.nodes for name in node.operands())
    reads.update((*block.outputs, *(name for _, name in block.updates)))
    makers = {node.outputs[0].name: node for node in block.nodes if len(node.outputs) == 1 and reads[node.outputs[0].name] == 1}
    out = []
    for loss in block.nodes:
        if loss.op != CROSS_ENTROPY or loss.no_grad:
            continue
        casts: list[Node] = []
        head = makers.get(loss.operands()[0])
        while head is not None and head.op == CAST:
            casts.insert(0, head)
            head = makers.get(head.operands()[0])
        if head is None or head.op != LINEAR or head.no_grad or not head.outputs[0].differentiable:
            continue
        computed = _COMPUTED_IN.get(head.outputs[0].dtype)
        if computed and all(cast.outputs[0].dtype == computed for cast in casts):
            out.append((head, *casts, loss))
    return tuple(out)


def with_chunks(block: Block, plans: Mapping[str, tuple[NodePlan, ...]]) -> dict[str, tuple[NodePlan, ...]]:
    """Return the strategies of each operation, with those in chunks."""
    out = dict(plans)
    for *before, loss in loss_chains(block):
        for node in before:
            out[node.name] += tuple(replace(each, function=WITHIN_LOSS) for each in plans[node.name] if _may_chunk(each))
        chunked = (replace(each, function=IN_CHUNKS[each.function]) for each in plans[loss.name] if each.function in IN_CHUNKS)
        out[loss.name] += tuple(chunked)
    return out


def _may_chunk(plan: NodePlan) -> bool:
    """Return whether each rank has whole logits of its tokens and classes."""
    places = (place for placements in (*plan.operands, *plan.results) for place in placements)
    return not plan.function and not any(isinstance(place, Partial) for place in places)


def plain_function(function: str) -> str:
    """Return the function of the same strategy without chunks."""
    without = {chunked: plain for plain, chunked in IN_CHUNKS.items()} | {WITHIN_LOSS: ""}
    return without.get(function, function)


def as_plain(plan: NodePlan) -> NodePlan:
    """Return the strategy without chunks."""
    return replace(plan, function=plain_function(plan.function)) if runs_in_chunks(plan.function) else plan


def chunk_pairs(block: Block) -> Iterator[tuple[Node, Node]]:
    """Yield the neighbours of each chain: where one runs in chunks so does the other, and takes the result as it is placed."""
    for chain in loss_chains(block):
        yield from pairwise(chain)


def check_chunks(block: Block, plans: Mapping[str, NodePlan]) -> None:
    """PlanError where functions in chunks are not those of whole chains, or something is converted within one."""
    right: set[str] = set()
    for *before, loss in loss_chains(block):
        ends = [plans[node.name] for node in (*before, loss)]
        joined = all(one.results[0] == other.operands[0] for one, other in pairwise(ends))
        if joined and ends[-1].function in IN_CHUNKS.values() and all(each.function == WITHIN_LOSS for each in ends[:-1]):
            right.update(each.node for each in ends)
    wrong = {name for name, plan in plans.items() if runs_in_chunks(plan.function)} - right
    if wrong:
        raise PlanError(f"block {block.name}: {min(wrong)} is not in chunks with all of head and loss; plan the model again")
