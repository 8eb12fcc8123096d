"""Peak memory of a candidate: which tensors live when, in bytes on one device.

Every term is linear in the choices (one tensor kept, one node's working set, one group's state), so that a solver can sum the
same terms: at the start of the backward all kept tensors and no gradient live, at its end all gradients and the first call's
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.state import StateMemory
from autopar.ir.graph import Block, Graph
from autopar.ir.placement import Placements
from autopar.ir.plan import Arc, BlockPlan, NodePlan
from autopar.rules.conversions import changed_axis, conversion

State = tuple[str, Placements]
"""A value in one placement."""


class Aliases:
    """Which states are one tensor: union-find over (value, placements)."""

    def __init__(self) -> None:
        self._parent: dict[State, State] = {}

    def find(self, state: State) -> State:
        parent = self._parent
        while (above := parent.get(state, state)) != state:
            parent[state] = parent.get(above, above)
            state = parent[state]
        return state

    def union(self, first: State, second: State) -> None:
        """The first stays the name of both."""
        first, second = self.find(first), self.find(second)
        if first != second:
            self._parent[second] = first


def aliases(block: Block, plans: Iterable[NodePlan], arcs: Iterable[Arc]) -> Aliases:
    """States that share storage: a view and what it views, and a conversion that does nothing forward (Invariant to Replicate and
    back). `plans` may be all strategies of all nodes, `arcs` all legal arcs: a union holds whenever its strategy is chosen."""
    found = Aliases()
    nodes = {node.name: node for node in block.nodes}
    values = block.values()
    for plan in plans:
        node = nodes[plan.node]
        if packet(node.op) in VIEWS and plan.operands:
            for output, placements in zip(node.outputs, plan.results, strict=True):
                found.union((node.operands()[0], plan.operands[0]), (output.name, placements))
    for arc in arcs:
        axis = changed_axis(arc.source, arc.target)
        how = conversion(arc.source[axis], arc.target[axis], values[arc.value].differentiable)
        if how is not None and how.forward is None:
            found.union((arc.value, arc.source), (arc.value, arc.target))
    return found


def kept_tensors(costs: BlockCosts, same: Aliases, plan: NodePlan) -> Iterator[tuple[State, float]]:
    """What the node keeps from forward to backward, by the name of its storage: (value, placements) or ``node+`` for what is
    kept beside operands and results. Equal names are one tensor, with the bytes of the whole storage
    (a kept slice keeps all)."""
    for kept in costs.kept(plan):
        state = same.find((kept.value, kept.placements))
        yield state, kept.bytes if state[0] == kept.value else costs.value_bytes(*state)


def working_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """What a node needs while it runs, beside what is kept: forward its results and the operands that nobody keeps, backward
    the gradients of both (a parameter's gradient is the state's). The block's is the maximum over its nodes."""
    node, saved = costs.nodes[plan.node], costs.saved[plan.node]
    if packet(node.op) in VIEWS:
        return 0.0
    results = [costs.value_bytes(v.name, at) for v, at in zip(node.outputs, plan.results, strict=True)]
    forward = backward = sum(results)
    for name, placements, kept in zip(node.operands(), plan.operands, saved.operands, strict=True):
        if costs.is_parameter(name):
            continue
        size = costs.value_bytes(name, placements)
        forward += 0.0 if kept else size
        backward += size if costs.values[name].differentiable else 0.0
    return max(forward, backward)


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """`internal` bytes are kept per call; `boundary` are kept inputs (index >= 0) and outputs (``-1 - index``) with their bytes,
    which calls share; `working` is the largest node's working set, with the gradients of the block's inputs. A recomputed block
    keeps its inputs alone, and everything else while it runs."""

    internal: float
    boundary: tuple[tuple[int, float], ...]
    working: float


def block_memory(costs: BlockCosts, plan: BlockPlan) -> BlockMemory:
    """What one call of the block keeps, each tensor once. Parameters as they are stored live anyway."""
    block = costs.block
    same = aliases(block, plan.nodes, plan.arcs)
    inputs = [(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)]
    outputs = list(zip(block.outputs, plan.outputs, strict=True))
    parameters = [(parameter.value.name, at) for parameter, at in zip(block.parameters, plan.parameters, strict=True)]
    stored = set(map(same.find, parameters))
    ends = {same.find(state): -1 - index for index, state in enumerate(outputs)}
    ends.update({same.find(state): index for index, state in enumerate(inputs)})
    kept = {
        state: size for node_plan in plan.nodes for state, size in kept_tensors(costs, same, node_plan) if state not in stored
    }
    gradients = sum(costs.value_bytes(name, at) for name, at in inputs if costs.values[name].differentiable)
    working = max((working_bytes(costs, node_plan) for node_plan in plan.nodes), default=0.0)
    if plan.recompute:
        again = sum(size for state, size in kept.items() if ends.get(state, -1) < 0)
        given = tuple((index, costs.value_bytes(*state)) for index, state in enumerate(inputs))
        return BlockMemory(0.0, given, working + gradients + again)
    return BlockMemory(
        sum(size for state, size in kept.items() if state not in ends),
        tuple((ends[state], size) for state, size in kept.items() if state in ends),
        working + gradients,
    )


@dataclass(frozen=True, slots=True)
class CallMemory:
    """One call: bytes kept from its forward to its backward, while it runs, and its own state."""

    kept: float
    working: float
    state: StateMemory


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


KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporaries", "buffers", "base")


def peak_memory(calls: Sequence[CallMemory], root: StateMemory, base_bytes: float, foreach: bool) -> dict[str, float]:
    """The table at the peak, a row per kind. `root` is the state of parameters that several calls share, gathered all step long;
    `foreach` tells that the optimizer holds one temporary of the master's size for every parameter at once.

    Moments: each call's forward, each call's backward (gradients of the later calls are there, kept tensors of the earlier
    ones), the optimizer. ZeRO-3 holds the weights of the call and of the one whose gather is prefetched.
    """
    states = [call.state for call in calls] + [root]
    fixed = {
        "parameters": sum(state.parameters for state in states),
        "optimizer": sum(state.optimizer for state in states),
        "buffers": sum(state.buffers for state in states),
        "base": base_bytes,
    }
    standing = root.gathered + sum(call.state.gathered for call in calls if not call.state.gathered_is_transient)
    moments = list(_moments(calls, root, standing))
    moments.append((sum(state.gradients for state in states), 0.0, 0.0, fixed["parameters"] if foreach else 0.0))
    gradients, gathered, activations, temporaries = max(moments, key=sum)
    table = fixed | {"gradients": gradients, "gathered": gathered, "activations": activations, "temporaries": temporaries}
    return {kind: table[kind] for kind in KINDS}


def _moments(calls: Sequence[CallMemory], root: StateMemory, standing: float) -> Iterable[tuple[float, float, float, float]]:
    """(gradients, gathered, activations, temporaries) during each call's forward, then backward."""
    passing = [call.state.gathered if call.state.gathered_is_transient else 0.0 for call in calls]
    kept = 0.0
    for index, call in enumerate(calls):
        kept += call.kept
        yield 0.0, standing + sum(passing[index : index + 2]), kept, call.working
    gradients = 0.0
    for index in reversed(range(len(calls))):
        call = calls[index]
        behind = calls[index + 1].state.reduced if index + 1 < len(calls) else 0.0
        shared = root.reduced + root.gradients
        gathered = standing + sum(passing[max(0, index - 1) : index + 1])
        gradients += call.state.gradients
        yield gradients + shared, gathered, kept, call.working + call.state.reduced + behind
        kept -= call.kept
