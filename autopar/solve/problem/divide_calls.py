"""Plans in which equal calls have two plans: as many of them as fit take one that is faster and needs more memory, as where
Megatron recomputes some of the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.step.evaluate import Evaluation
from autopar.ir.graph import Graph
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.plan import BlockPlan, Candidate
from autopar.solve.problem.boundary import BlockBoundaries

Price = Callable[[Graph, Mapping[str, str], Candidate], Evaluation]
"""Price a candidate for a graph whose blocks are, by name, those of the original graph."""


@dataclass(frozen=True, slots=True)
class DividedCalls:
    """A plan that fits, with the graph that has a block for each plan of a call. `originals`: the captured block of each."""

    graph: Graph
    candidate: Candidate
    evaluation: Evaluation
    originals: Mapping[str, str]


def divide_calls(boundary: BlockBoundaries, frugal: Candidate, fast: Candidate, price: Price) -> DividedCalls | None:
    """Return the fastest plan in which the first calls of each block, or its last ones, take the plan of `fast`, as many of them
    as fit, and the others that of `frugal`, which fits. None where none fits, or tensors between calls are placed otherwise."""
    if not _agree(boundary, frugal, fast):
        return None
    most = max(boundary.graph.count(name) for name in boundary.blocks)
    best: DividedCalls | None = None
    for last in (True, False):
        fits, too_many = 0, most
        while too_many - fits > 1:
            share = (fits + too_many) // 2 / most
            divided = _divided(boundary.graph, frugal, fast, share, last, price)
            if not divided.evaluation.fits:
                too_many = round(share * most)
                continue
            fits = round(share * most)
            if best is None or divided.evaluation.step_seconds < best.evaluation.step_seconds:
                best = divided
    return best


def _agree(boundary: BlockBoundaries, frugal: Candidate, fast: Candidate) -> bool:
    """Return whether calls with either plan hand each other what they need: tensors between calls, and parameters that several of
    them read, have the same placements."""
    shared = {(kind.block, index) for kind in boundary.kind_counts for index, own in enumerate(kind.own) if not own}
    for one, other in zip(frugal.blocks, fast.blocks, strict=True):
        if (one.inputs, one.outputs) != (other.inputs, other.outputs):
            return False
        if any(
            (one.block, index) in shared and one.parameters[index] != other.parameters[index]
            for index in range(len(one.parameters))
        ):
            return False
    return True


def _divided(graph: Graph, frugal: Candidate, fast: Candidate, share: float, last: bool, price: Price) -> DividedCalls:
    """Return the plan in which this share of the calls of each block, its last ones or its first, takes the plan of `fast`."""
    seen, plans = Counter[str](), list[BlockPlan]()
    for call in graph.calls:
        count, place = graph.count(call.block), seen[call.block]
        seen[call.block] += 1
        faster = round(share * count)
        is_fast = place >= count - faster if last else place < faster
        plans.append((fast if is_fast else frugal).block(call.block))
    variants, blocks, originals = with_stage_variants(graph, plans)
    candidate = replace(frugal, blocks=blocks)
    return DividedCalls(variants, candidate, price(variants, originals, candidate), originals)
