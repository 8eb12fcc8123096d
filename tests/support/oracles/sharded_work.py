"""How much of a model's work a plan cuts on a model axis, and what it leaves whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.cost_models.compute.operations import Profile, profile, work_shards
from autopar.ir.graph import Block, Graph
from autopar.ir.plan import Candidate
from autopar.rules.expand import block_strategies, fit_node
from autopar.rules.registry import PASS, REDUNDANT, default_registry

REPORTED = 0.0005
"""Less than this share of the FLOPs is not named."""


@dataclass(frozen=True, slots=True)
class ShardedWork:
    """What is whole: a share of the FLOPs and one of the memory traffic of forward and backward; and the operations behind the
    first, with the reason, the most expensive first. `without_rule` are the operations that no rule fits."""

    share: float
    traffic_share: float
    whole: tuple[tuple[str, float], ...]
    without_rule: tuple[str, ...]

    def named(self) -> str:
        """The operations of more than `REPORTED`."""
        return ", ".join(f"{name} {share:.1%}".replace("%", " %") for name, share in self.whole if share >= REPORTED)


def never_sharded(graph: Graph, size: int, any_size: bool = False) -> ShardedWork:
    """What no strategy cuts on a model axis of this size; with `any_size`, on one that shards the batch too (``ep``)."""
    reasons: dict[tuple[str, str], str] = {}
    for block in graph.blocks:
        reasons |= {(block.name, name): reason for name, reason in _why(graph, block, size, any_size).items()}
    return _measure(graph, reasons)


def not_sharded(graph: Graph, candidate: Candidate, axis: str) -> ShardedWork:
    """What a plan computes on every rank of the axis."""
    index, sizes = candidate.mesh.index(axis), candidate.mesh.sizes
    reasons: dict[tuple[str, str], str] = {}
    for block in graph.blocks:
        why = _why(graph, block, sizes[index])
        for plan in candidate.block(block.name).nodes:
            if work_shards(plan.operands, plan.results, sizes)[index] == 1:
                reasons[block.name, plan.node] = why.get(plan.node, "by choice")
    return _measure(graph, reasons)


def _why(graph: Graph, block: Block, size: int, any_size: bool = False) -> dict[str, str]:
    """The nodes that nothing cuts on a model axis, and why."""
    registry, values = default_registry(), block.values()
    made = block_strategies(
        block, size, batch_axis=False, batch_is_symbolic=graph.batch_is_symbolic, registry=registry, any_size=any_size
    )
    return {
        node.name: "no rule" if fit_node(node, values, registry) is None else "nothing divides"
        for node in block.nodes
        if {each.factor for each in made[node.name]} <= {REDUNDANT, PASS}
    }


def _measure(graph: Graph, reasons: dict[tuple[str, str], str]) -> ShardedWork:
    total, moved, idle, costs, unruled = 0.0, 0.0, 0.0, Counter[str](), dict[str, None]()
    for block in graph.blocks:
        values, times = block.values(), graph.count(block.name)
        for node in block.nodes:
            known = profile(node, values, graph.batch)
            flops, traffic = (known.forward_flops + known.backward_flops) * times, _traffic(known) * times
            total, moved = total + flops, moved + traffic
            reason = reasons.get((block.name, node.name))
            if reason is not None:
                idle += traffic
                unruled |= {node.op.split(".")[1]: None} if reason == "no rule" else {}
                costs[f"{node.op.split('.')[1]} at {node.source or node.name} ({reason})"] += flops
    whole = tuple((name, cost / total) for name, cost in costs.most_common() if cost)
    return ShardedWork(sum(costs.values()) / max(total, 1.0), idle / max(moved, 1.0), whole, tuple(unruled))


def _traffic(known: Profile) -> float:
    """Bytes read and written, forward and backward."""
    sides = (
        (known.operand_bytes, known.forward_operands), (known.result_bytes, known.forward_results),
        (known.operand_bytes, known.backward_operands), (known.result_bytes, known.backward_results),
    )  # fmt: skip
    return sum(size * times for sizes, touched in sides for size, times in zip(sizes, touched, strict=True))
