"""What one call of a block keeps and holds, in bytes on one device: which tensors live when (`peak` puts calls together).

Every term is linear in the choices (one tensor kept, one node's working set), so that a solver can sum the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.compute import share_of_copies
from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.replay import Replay
from autopar.cost_models.storages import Aliases, State, aliases
from autopar.ir.graph import Graph
from autopar.ir.plan import Arc, BlockPlan, NodePlan
from autopar.rules.conversions import changed_axis, conversion

OFFLOAD_WINDOW = 2.0
"""Calls whose offloaded tensors are on the device: the one that runs, and the one being copied."""


IN_PLACE = frozenset(("ap.cross_entropy_sharded",))
"""Functions of the runtime whose backward makes its result and nothing beside."""


def kept_tensors(costs: BlockCosts, same: Aliases, plan: NodePlan) -> Iterator[tuple[State, float]]:
    """What the node keeps from forward to backward, by the name of its storage: (value, placements) or ``node+`` for what is
    kept beside operands and results. Equal names are one tensor, with the bytes of the whole storage
    (a kept slice keeps all)."""
    for kept in costs.kept(plan):
        state = same.find((kept.value, kept.placements))
        yield state, kept.bytes if state[0] == kept.value else costs.value_bytes(*state)


def working_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """What the backward of a node holds beside what is kept: the gradients of its results and operands (of parameters too, until
    they are reduced), and what the operation itself needs. The block's is the maximum over its nodes."""
    node, saved = costs.nodes[plan.node], costs.saved[plan.node]
    if packet(node.op) in VIEWS or node.no_grad:
        return 0.0
    sizes = [costs.value_bytes(v.name, at) for v, at in zip(node.outputs, plan.results, strict=True) if v.differentiable]
    for name, placements in zip(node.operands(), plan.operands, strict=True):
        if costs.values[name].differentiable:
            sizes.append(costs.value_bytes(name, placements))
    ratio = 0.0 if plan.function in IN_PLACE else saved.backward_ratio
    return sum(sizes) + ratio * _largest_bytes(costs, plan) if sizes else 0.0


def momentary_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """What the forward of a node holds beside operands, results and what is kept, until it ends."""
    return costs.saved[plan.node].forward_ratio * _largest_bytes(costs, plan)


def _largest_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    node, at = costs.nodes[plan.node], costs.saved[plan.node].largest
    if at < 0:
        return costs.value_bytes(node.outputs[-1 - at].name, plan.results[-1 - at])
    whole = costs.value_bytes(node.operands()[at], plan.operands[at]) if plan.operands else 0.0
    return whole * share_of_copies(node, plan, costs.profile(plan.node), costs.mesh.sizes, costs.cluster)


def made_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """What the forward of a node makes: its results and what is kept beside them. A forward is a function whose variables live
    until it returns, so all of it is there at its end. Views make nothing."""
    node = costs.nodes[plan.node]
    if packet(node.op) in VIEWS and plan.operands:
        return 0.0
    results = sum(costs.value_bytes(v.name, at) for v, at in zip(node.outputs, plan.results, strict=True))
    return results + sum(kept.bytes for kept in costs.kept(plan) if kept.value.endswith("+"))


def arc_bytes(costs: BlockCosts, arc: Arc) -> float:
    """What a conversion makes; nothing where source and target share storage."""
    axis = changed_axis(arc.source, arc.target)
    how = conversion(arc.source[axis], arc.target[axis], costs.values[arc.value].differentiable)
    return 0.0 if how is not None and how.forward is None else costs.value_bytes(arc.value, arc.target)


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """`internal` bytes are kept per call; `boundary` are kept inputs (index >= 0) and outputs (``-1 - index``) with their bytes,
    which calls share. Beside what is kept: `made` is all that a call's forward makes, kept or not, at its end; `working` is the
    largest node's working set in the backward, with the gradients of the block's inputs; `ending` are those gradients alone, when
    the backward ends. `peak_nodes` are the nodes that `made` and `working` are largest at. A recomputed block keeps its inputs
    alone, and everything else while its backward runs. `host` bytes per call wait in the host's memory."""

    internal: float
    boundary: tuple[tuple[int, float], ...]
    made: float
    working: float
    ending: float = 0.0
    host: float = 0.0
    peak_nodes: tuple[str, str] = ("", "")


def block_memory(
    costs: BlockCosts, plan: BlockPlan, same: Aliases | None = None, replay: Replay | None = None
) -> BlockMemory:
    """What one call of the block keeps, each tensor once. Parameters as they are stored live anyway. `same` and `replay` are
    those of the plan, for callers that have them."""
    block = costs.block
    same = same or aliases(block, plan.nodes, plan.arcs)
    inputs = [(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)]
    ends = {same.find(state): -1 - index for index, state in enumerate(zip(block.outputs, plan.outputs, strict=True))}
    ends.update({same.find(state): index for index, state in enumerate(inputs)})
    replay = replay or Replay.of(costs, plan, same)
    gradients = sum(costs.value_bytes(name, at) for name, at in inputs if costs.values[name].differentiable)
    made, working, nodes = _run(costs, plan)
    recomputed, offloaded = sum(replay.recomputed.values()), sum(replay.offloaded.values())
    kept = {state: size for state, size in replay.kept.items() if state not in replay.offloaded}
    if plan.recompute:
        given = tuple((index, costs.value_bytes(*state)) for index, state in enumerate(inputs))
        returned = sum(costs.value_bytes(*state) for state in zip(block.outputs, plan.outputs, strict=True))  # not made again
        again = max(working + recomputed, made - returned)
        return BlockMemory(0.0, given, made, gradients + again, gradients, peak_nodes=nodes)
    return BlockMemory(
        sum(size for state, size in kept.items() if state not in ends),
        tuple((ends[state], size) for state, size in kept.items() if state in ends),
        made + (OFFLOAD_WINDOW - 1) * offloaded,
        working + gradients + recomputed + OFFLOAD_WINDOW * offloaded,
        gradients,
        offloaded,
        nodes,
    )


def _run(costs: BlockCosts, plan: BlockPlan) -> tuple[float, float, tuple[str, str]]:
    """What the forward makes, the backward's largest working set, and the nodes that need most in each."""
    made = sum(made_bytes(costs, each) for each in plan.nodes)
    made += sum(arc_bytes(costs, arc) for arc in plan.arcs)
    largest = max(plan.nodes, key=lambda each: made_bytes(costs, each) + momentary_bytes(costs, each), default=None)
    moment = max((momentary_bytes(costs, each) for each in plan.nodes), default=0.0)
    working, node = max(((working_bytes(costs, each), each.node) for each in plan.nodes), default=(0.0, ""))
    return made + moment, working, (largest.node if largest else "", node)


def call_kept(graph: Graph, blocks: Mapping[str, BlockMemory]) -> list[float]:
    """Bytes that each call keeps; a tensor between calls counts at the first that keeps it."""
    seen: set[str] = set()
    out = []
    for call in graph.calls:
        memory = blocks[call.block]
        kept = memory.internal
        for index, size in memory.boundary:
            name = call.inputs[index] if index >= 0 else call.outputs[-1 - index]
            if name not in seen:
                seen.add(name)
                kept += size
        out.append(kept)
    return out
