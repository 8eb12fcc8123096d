"""Plans that recompute random operations and offload random tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.recompute import RecomputePlan, overwritten_values, with_least_recompute
from autopar.cost_models.tensors.aliases import Aliases, PlacedValue, aliases
from autopar.ir.graph import Block, Graph
from autopar.ir.partition_saved import replicated_on
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate, Conversion


def with_replays(graph: Graph, candidate: Candidate, seed: int, share: float = 0.5, offload: float = 0.1) -> Candidate:
    """`share` of the operations and conversions are recomputed; `offload` of all tensors that are left saved are offloaded."""
    random = Random(seed)
    blocks = {block.name: block for block in graph.blocks}
    plans = tuple(_drawn(blocks[plan.block], plan, random, share, offload) for plan in candidate.blocks)
    return replace(candidate, blocks=plans)


def with_kept(graph: Graph, candidate: Candidate, cluster: Cluster, seed: int, share: float, offload: float = 0.0) -> Candidate:
    """As a planner would: `share` of the storages are saved for backward, and the least is recomputed that makes
    the rest; `offload` of what is saved is offloaded."""
    plans = []
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster)
        same = aliases(block, plan.nodes, plan.conversions)

        def draw(state: PlacedValue, what: str, name: str = block.name) -> float:
            return Random(f"{seed} {what} {name} {state}").random()

        def saved(state: PlacedValue, same: Aliases = same) -> bool:
            return draw(same.find(state), "kept") < share

        ready = {node.name for node in block.nodes if not overwritten_values(block) & set(node.operands())}
        chosen = with_least_recompute(
            costs, replace(plan, recompute_nodes=(), recompute_conversions=(), offload=()), saved, ready
        )
        left = RecomputePlan.of(costs, chosen, same).saved
        away = tuple(state for state in left if not state[0].endswith("+") and draw(state, "host") < offload)
        plans.append(replace(chosen, offload=away))
    return replace(candidate, blocks=tuple(plans))


def with_partition(graph: Graph, candidate: Candidate, cluster: Cluster, axis: str, least_bytes: float = 0.0) -> Candidate:
    """Every saved tensor of so many bytes that is replicated on the axis is saved in parts."""
    index = candidate.mesh.index(axis)
    plans = []
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster)
        saved = RecomputePlan.of(costs, plan, aliases(block, plan.nodes, plan.conversions))
        left = {at: size for at, size in saved.saved.items() if at not in saved.offloaded and not at[0].endswith("+")}
        parts = tuple((*at, axis) for at, size in left.items() if replicated_on(at[1], index) and size >= least_bytes)
        plans.append(plan if plan.recompute else replace(plan, partition_saved=parts))
    return replace(candidate, blocks=tuple(plans))


def _drawn(block: Block, plan: BlockPlan, random: Random, share: float, offload: float) -> BlockPlan:
    once = overwritten_values(block)
    may = [node.name for node in block.nodes if not once & set(node.operands())]
    nodes = tuple(name for name in may if random.random() < share)
    conversions = tuple(conversion for conversion in plan.conversions if conversion.value not in once and random.random() < share)
    left = [state for state in _states(block, plan, nodes, conversions) if state[0] not in once]
    return replace(
        plan,
        recompute_nodes=nodes,
        recompute_conversions=conversions,
        offload=tuple(state for state in left if random.random() < offload),
    )


def _states(
    block: Block, plan: BlockPlan, nodes: tuple[str, ...], conversions: tuple[Conversion, ...]
) -> Iterator[tuple[str, Placements]]:
    """What is produced once: inputs, results, and what conversions that communicate make."""
    yield from ((value.name, where) for value, where in zip(block.inputs, plan.inputs, strict=True))
    results = {each.node: each.results for each in plan.nodes}
    for node in block.nodes:
        if node.name not in nodes:
            yield from ((value.name, where) for value, where in zip(node.outputs, results[node.name], strict=True))
