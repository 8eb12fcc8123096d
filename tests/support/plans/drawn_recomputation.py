"""Plans that recompute random operations and offload random tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import RecomputePlan, overwritten_values, with_least_recompute
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue, aliases
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.partition_saved import replicated_on
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate, Conversion
from autopar.solve.ilp.linear_model import Status
from autopar.solve.result import PlanResult
from support.plans.drawn_candidates import drawn_candidate


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

        chosen = with_least_recompute(costs, replace(plan, recompute_nodes=(), recompute_conversions=(), offload=()), saved)
        left = RecomputePlan.of(costs, chosen).saved
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
        saved = RecomputePlan.of(costs, plan)
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


def drawn_above_bounds(graph: Graph, cluster: Cluster, result: PlanResult, seeds: int) -> int:
    """The number of plans that fit, of those drawn at each point of a search. AssertionError where one is below a bound of it."""
    fitting = 0
    for point in result.solutions:
        at = point.point
        for seed in range(seeds) if at.stages == 1 else ():
            zero = seed % 4 if at.mesh.size_of(DATA_AXIS) > 1 else 0
            drawn = drawn_candidate(graph, at.mesh, seed, zero=zero, wild=0.3 * (seed % 2))
            drawn = with_replays(graph, drawn, seed, offload=0.0) if seed > 1 else drawn
            found = evaluate(graph, replace(drawn, micro_batches=at.micro_batches, zero_group=at.zero_group), cluster)
            if found.fits:
                fitting += 1
                assert point.status is not Status.INFEASIBLE
                assert found.step_seconds >= point.bound_seconds * (1 - 1e-6)
                assert found.step_seconds >= result.lower_bound_seconds * (1 - 1e-6)
    return fitting
