"""Memory of one call of a block, in bytes on one device: saved activations, and working sets of its forward and backward.

`memory_events` puts the calls of a stage together. Every term is linear in the plan's choices (one saved tensor, one node's
working set), so that the solver's linear model sums the same terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_models.compute.loss_chunks import chunk_bytes
from autopar.cost_models.compute.operations import token_copy_share
from autopar.cost_models.step.block_costs import BlockCosts, SavedTensor
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue
from autopar.ir.graph import Graph
from autopar.ir.plan import BlockPlan, Conversion, NodePlan
from autopar.operations.losses import WITHIN_LOSS, runs_in_chunks
from autopar.operations.table import operation
from autopar.rules.conversions import axis_conversion, changed_axis

OFFLOAD_WINDOW = 2.0
"""Calls whose offloaded tensors are on the device: the one that runs, and the one whose copy is under way."""


class HeldBytes(NamedTuple):
    """The bytes on the device of a tensor that a backward needs and that is not saved there whole: from forward to backward, and
    beside these while the forward and the backward of its call run."""

    saved: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


def recomputed_bytes(size: float) -> HeldBytes:
    """Return the bytes of a tensor that is recomputed."""
    return HeldBytes(backward=size)


def offloaded_bytes(size: float) -> HeldBytes:
    """Return the bytes of a tensor that lies in host memory meanwhile."""
    return HeldBytes(forward=(OFFLOAD_WINDOW - 1) * size, backward=OFFLOAD_WINDOW * size)


def partitioned_bytes(size: float, ranks: int) -> HeldBytes:
    """Return the bytes of a tensor that is saved in parts: the part of one rank, its copy, and what the backward gathers."""
    return HeldBytes(size / ranks, size / ranks, size)


def saved_storages(costs: BlockCosts, same: Aliases, plan: NodePlan) -> Iterator[tuple[PlacedValue, float]]:
    """Yield what the node saves for its backward, as (storage, bytes). A storage is named by its first (value, placements), or as
    `extra_storage` says for what is saved beside operands and results; a saved view counts the whole storage."""
    for saved in costs.saved_tensors(plan):
        if saved.value.endswith("+"):
            yield extra_storage(saved), saved.bytes
            continue
        storage = same.find((saved.value, saved.placements))
        yield storage, saved.bytes if storage[0] == saved.value else costs.value_bytes(*storage)


def extra_storage(saved: SavedTensor) -> PlacedValue:
    """Return the storage of what an operation saves beside operands and results, told apart by its bytes: strategies whose
    placements there are the same may save more or less (experts of all tokens, or of those that were sent to a rank)."""
    return f"{saved.value[:-1]} ({saved.bytes:.0f} B)+", saved.placements


def backward_working_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """Return what the backward of a node holds beside saved tensors: the gradients of its results and operands (of parameters
    too, until they are reduced) and its workspace. A block's working set is the maximum over its nodes."""
    node, saved = costs.nodes[plan.node], costs.saved[plan.node]
    if operation(node.op).view or node.no_grad or runs_in_chunks(plan.function):  # its gradients are those that it saved
        return 0.0
    sizes = [costs.value_bytes(v.name, at) for v, at in zip(node.outputs, plan.results, strict=True) if v.differentiable]
    for name, placements in zip(node.operands(), plan.operands, strict=True):
        if costs.values[name].differentiable:
            sizes.append(costs.value_bytes(name, placements))
    ratio = 0.0 if operation(node.op).function(plan.function).in_place else saved.backward_workspace_ratio
    return sum(sizes) + ratio * _largest_bytes(costs, plan) + _padded_bytes(costs, plan) if sizes else 0.0


def forward_workspace_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """Return what the forward of a node holds until it ends, beside operands, results and saved tensors."""
    if runs_in_chunks(plan.function):
        node = costs.nodes[plan.node]
        return chunk_bytes(node, costs.value_bytes(node.name, plan.results[0]), costs.chunks(plan))
    return costs.saved[plan.node].forward_workspace_ratio * _largest_bytes(costs, plan) + _padded_bytes(costs, plan)


def _padded_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """Return the bytes of the copy of an image's shard beside the rows of its neighbours."""
    node = costs.nodes[plan.node]
    return costs.value_bytes(node.operands()[0], plan.operands[0]) if operation(node.op).function(plan.function).pads else 0.0


def _largest_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """Return the bytes of the largest tensor of the node, which its workspace is proportional to."""
    node, at = costs.nodes[plan.node], costs.saved[plan.node].workspace_reference
    if at < 0:
        return costs.value_bytes(node.outputs[-1 - at].name, plan.results[-1 - at])
    whole = costs.value_bytes(node.operands()[at], plan.operands[at]) if plan.operands else 0.0
    return whole * token_copy_share(node, plan, costs.profile(plan.node), costs.mesh.sizes, costs.cluster)


def forward_output_bytes(costs: BlockCosts, plan: NodePlan) -> float:
    """Return what the forward of a node allocates and leaves: its results, and what it saves beside them. A block's forward is a
    function whose variables live until it returns, so at its end all of it is there. Views allocate nothing."""
    node = costs.nodes[plan.node]
    if operation(node.op).view and plan.operands:
        return 0.0
    results = sum(costs.value_bytes(v.name, at) for v, at in zip(node.outputs, plan.results, strict=True))
    results *= plan.function != WITHIN_LOSS
    return results + sum(saved.bytes for saved in costs.saved_tensors(plan) if saved.value.endswith("+"))


def conversion_bytes(costs: BlockCosts, change: Conversion) -> float:
    """Return what a placement conversion allocates; nothing where source and target share storage."""
    axis = changed_axis(change.source, change.target)
    how = axis_conversion(change.source[axis], change.target[axis], costs.values[change.value].differentiable)
    return 0.0 if how is not None and how.forward is None else costs.value_bytes(change.value, change.target)


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """The memory of one call. (A block recomputed as a whole saves its inputs alone, and holds everything else in its backward.)

    internal_saved_bytes: saved tensors that no other call sees.
    boundary_saved_bytes: saved inputs (index >= 0) and outputs (``-1 - index``) with their bytes; calls share them.
    forward_bytes: all that the forward allocates, saved or not, at its end.
    backward_bytes: the largest working set of the backward, with the gradients of the block's inputs, beside saved tensors.
    input_gradient_bytes: the gradients of the block's inputs, which are left when its backward ends.
    offloaded_bytes: saved tensors in host memory.
    peak_nodes: the nodes at which forward and backward hold most.
    """

    internal_saved_bytes: float
    boundary_saved_bytes: tuple[tuple[int, float], ...]
    forward_bytes: float
    backward_bytes: float
    input_gradient_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    peak_nodes: tuple[str, str] = ("", "")


def block_memory(costs: BlockCosts, plan: BlockPlan, recompute: RecomputePlan | None = None) -> BlockMemory:
    """Return the memory of one call of the block, each storage once. Parameters as they are stored are not counted. `recompute`:
    that of the plan, for callers that have it."""
    block, recompute = costs.block, recompute or RecomputePlan.of(costs, plan)
    same = recompute.same
    inputs = [(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)]
    outputs = list(zip(block.outputs, plan.outputs, strict=True))
    input_gradients = sum(costs.value_bytes(name, at) for name, at in inputs if costs.values[name].differentiable)
    forward, backward, nodes = _working_sets(costs, plan)
    if plan.recompute:
        recomputed = sum(recompute.recomputed.values())
        saved_inputs = tuple((index, costs.value_bytes(*value)) for index, value in enumerate(inputs))
        returned = sum(costs.value_bytes(*value) for value in outputs)  # not recomputed
        return BlockMemory(
            internal_saved_bytes=0.0,
            boundary_saved_bytes=saved_inputs,
            forward_bytes=forward,
            backward_bytes=input_gradients + max(backward + recomputed, forward - returned),
            input_gradient_bytes=input_gradients,
            peak_nodes=nodes,
        )
    boundary = {same.find(value): -1 - index for index, value in enumerate(outputs)}
    boundary.update({same.find(value): index for index, value in enumerate(inputs)})
    elsewhere = {*recompute.offloaded, *recompute.partitioned}
    saved = {storage: size for storage, size in recompute.saved.items() if storage not in elsewhere}
    held = [*map(recomputed_bytes, recompute.recomputed.values()), *map(offloaded_bytes, recompute.offloaded.values())]
    for storage, axis in recompute.partitioned.items():
        held.append(partitioned_bytes(recompute.saved[storage], costs.mesh.sizes[axis]))
        if boundary.get(storage, -1) >= 0:  # nothing but the call holds the whole input
            held.append(HeldBytes(forward=recompute.saved[storage]))
    internal = sum(size for storage, size in saved.items() if storage not in boundary)
    return BlockMemory(
        internal_saved_bytes=internal + sum(each.saved for each in held),
        boundary_saved_bytes=tuple((boundary[storage], size) for storage, size in saved.items() if storage in boundary),
        forward_bytes=forward + sum(each.forward for each in held),
        backward_bytes=backward + input_gradients + sum(each.backward for each in held),
        input_gradient_bytes=input_gradients,
        offloaded_bytes=sum(recompute.offloaded.values()),
        peak_nodes=nodes,
    )


def _working_sets(costs: BlockCosts, plan: BlockPlan) -> tuple[float, float, tuple[str, str]]:
    """Return the bytes of the forward, the largest working set of the backward, and the nodes that need most in each."""
    outputs = sum(forward_output_bytes(costs, each) for each in plan.nodes)
    outputs += sum(conversion_bytes(costs, each) for each in plan.conversions)
    largest = max(
        plan.nodes, key=lambda each: forward_output_bytes(costs, each) + forward_workspace_bytes(costs, each), default=None
    )
    workspace = max((forward_workspace_bytes(costs, each) for each in plan.nodes), default=0.0)
    backward, node = max(((backward_working_bytes(costs, each), each.node) for each in plan.nodes), default=(0.0, ""))
    return outputs + workspace, backward, (largest.node if largest else "", node)


def call_saved_bytes(graph: Graph, blocks: Mapping[str, BlockMemory]) -> list[float]:
    """Return the bytes that each call saves; a tensor between calls counts at the first that saves it."""
    seen: set[str] = set()
    out = []
    for call in graph.calls:
        memory = blocks[call.block]
        saved = memory.internal_saved_bytes
        for index, size in memory.boundary_saved_bytes:
            name = call.inputs[index] if index >= 0 else call.outputs[-1 - index]
            if name not in seen:
                seen.add(name)
                saved += size
        out.append(saved)
    return out
