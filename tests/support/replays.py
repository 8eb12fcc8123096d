"""Plans that run random parts of the forward again and keep random tensors on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.replay import Replay, again_without, bound_once
from autopar.cost_models.storages import Aliases, State, aliases
from autopar.ir.graph import Block, Graph
from autopar.ir.placement import Placements
from autopar.ir.plan import Arc, BlockPlan, Candidate


def with_replays(graph: Graph, candidate: Candidate, seed: int, share: float = 0.5, offload: float = 0.1) -> Candidate:
    """`share` of the operations and conversions run again; `offload` of all states that are left wait on the host."""
    random = Random(seed)
    blocks = {block.name: block for block in graph.blocks}
    plans = tuple(_drawn(blocks[plan.block], plan, random, share, offload) for plan in candidate.blocks)
    return replace(candidate, blocks=plans)


def with_kept(graph: Graph, candidate: Candidate, cluster: Cluster, seed: int, share: float, offload: float = 0.0) -> Candidate:
    """As a planner would: `share` of the storages are kept, and the least runs again that makes the rest; `offload` of what is
    kept waits on the host."""
    plans = []
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster)
        same = aliases(block, plan.nodes, plan.arcs)

        def draw(state: State, what: str, name: str = block.name) -> float:
            return Random(f"{seed} {what} {name} {state}").random()

        def kept(state: State, same: Aliases = same) -> bool:
            return draw(same.find(state), "kept") < share

        ready = {node.name for node in block.nodes if not bound_once(block) & set(node.operands())}
        chosen = again_without(costs, replace(plan, again=(), again_arcs=(), offload=()), kept, ready)
        left = Replay.of(costs, chosen, same).kept
        away = tuple(state for state in left if not state[0].endswith("+") and draw(state, "host") < offload)
        plans.append(replace(chosen, offload=away))
    return replace(candidate, blocks=tuple(plans))


def _drawn(block: Block, plan: BlockPlan, random: Random, share: float, offload: float) -> BlockPlan:
    once = bound_once(block)
    may = [node.name for node in block.nodes if not once & set(node.operands())]
    again = tuple(name for name in may if random.random() < share)
    arcs = tuple(arc for arc in plan.arcs if arc.value not in once and random.random() < share)
    left = [state for state in _states(block, plan, again, arcs) if state[0] not in once]
    return replace(plan, again=again, again_arcs=arcs, offload=tuple(state for state in left if random.random() < offload))


def _states(block: Block, plan: BlockPlan, again: tuple[str, ...], arcs: tuple[Arc, ...]) -> Iterator[tuple[str, Placements]]:
    """What is produced once: inputs, results, and what conversions that communicate make."""
    yield from ((value.name, where) for value, where in zip(block.inputs, plan.inputs, strict=True))
    results = {each.node: each.results for each in plan.nodes}
    for node in block.nodes:
        if node.name not in again:
            yield from ((value.name, where) for value, where in zip(node.outputs, results[node.name], strict=True))
