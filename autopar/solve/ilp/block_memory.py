"""The memory of one call of each block in the ILP; mirrors `cost_models.step.block_memory`.

What is not linear (which calls share a boundary tensor) is counted at its least, so that the rows never forbid a plan that fits.
A solution that then does not fit is solved again with a smaller capacity (`solve_mesh`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.cost_models.step.block_memory import (
    backward_working_bytes,
    conversion_bytes,
    forward_output_bytes,
    forward_workspace_bytes,
)
from autopar.cost_models.step.recompute import recomputable_nodes
from autopar.ir.plan import Conversion
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import Terms, add, total
from autopar.solve.ilp.storages import boundary_values
from autopar.solve.problem.boundary import BlockBoundaries, Slot
from autopar.solve.problem.problem import BlockTable, Problem


@dataclass(frozen=True, slots=True)
class BoundarySaved:
    """A saved tensor between calls: where it is read or written, its size in units of bytes, and S."""

    slot: Slot
    size: float
    saved: int


@dataclass(slots=True)
class BlockMemoryTerms:
    """The terms of `BlockMemory` per block, as expressions in units of bytes.

    internal_saved: saved tensors that no other call has. forward_bytes: what the forward allocates. backward_bytes: the largest
    working set of the backward, beside saved tensors. input_gradient_bytes: what is left of it when the backward ends.
    boundary_saved: saved tensors between calls, of all blocks.
    """

    internal_saved: dict[str, Terms] = field(default_factory=dict)
    forward_bytes: dict[str, Terms] = field(default_factory=dict)
    backward_bytes: dict[str, Terms] = field(default_factory=dict)
    input_gradient_bytes: dict[str, Terms] = field(default_factory=dict)
    boundary_saved: list[BoundarySaved] = field(default_factory=list)


def add_block_memory(form: Formulation, name: str, table: BlockTable, out: BlockMemoryTerms) -> None:
    """Add the terms of one block, and the rows that define them."""
    storages = form.storages[name]
    model, byte, costs = form.model, form.byte_unit, table.costs
    parts, forward_held, backward_held = storages.held_bytes(form.problem.mesh.sizes)
    _add_saved(form, name, table, out, parts)
    working, workspace = model.variable(), model.variable()
    forward: Expression = {}
    for node, strategies in table.strategies.items():
        pairs = list(zip(strategies, form.x[name, node], strict=True))
        # working >= sum_s x * working set of the backward, workspace >= sum_s x * that of the forward, for every operation
        model.at_least(working, {x: backward_working_bytes(costs, each.plan) / byte for each, x in pairs})
        model.at_least(workspace, {x: forward_workspace_bytes(costs, each.plan) / byte for each, x in pairs})
        add(forward, {x: forward_output_bytes(costs, each.plan) / byte for each, x in pairs})
    for value, conversions in table.conversions.items():
        for edge, y in zip(conversions.edges, form.y[name, value], strict=True):
            size = conversion_bytes(costs, Conversion(value, conversions.states[edge.source], conversions.states[edge.target]))
            add(forward, {y: size / byte} if size else {})
    gradients = _input_gradients(form, name, table)
    forward = total((1.0, forward), (1.0, {workspace: 1.0}), (1.0, forward_held))
    out.forward_bytes[name] = _one_variable(form, forward)
    out.input_gradient_bytes[name] = _one_variable(form, gradients)
    backward = total((1.0, {working: 1.0}), (1.0, gradients), (1.0, backward_held))
    out.backward_bytes[name] = _one_variable(form, backward)


def _add_saved(form: Formulation, name: str, table: BlockTable, out: BlockMemoryTerms, parts: Terms) -> None:
    model, storages = form.model, form.storages[name]
    ends = {storages.same.find((value, at)): (slot, w) for slot, value, at, w in boundary_values(form, table)}
    internal: Expression = dict(parts)
    for storage, saved in storages.saved.items():
        size = storages.sizes[storage]
        slot, w = ends.get(storage, (None, {}))
        if slot is None:
            add(internal, {saved: size})
            continue
        if slot.side != "param":
            out.boundary_saved.append(BoundarySaved(slot, size, saved))
        extra = _extra_calls(form.problem.boundary, slot)
        if extra:
            # E[t] >= S[t] - w: converted inside the block, so each call saves its own
            own = model.variable(1.0)
            model.at_least(own, total((1.0, {saved: 1.0}), (-1.0, w)))
            add(internal, {own: size * extra})
    out.internal_saved[name] = {model.define(internal): 1.0} if internal else {}


def _extra_calls(boundary: BlockBoundaries, slot: Slot) -> float:
    """Return how many more calls the block has than distinct tensors come in at the slot, as a share of its calls."""
    calls = [call for call in boundary.graph.calls if call.block == slot.block]
    if slot.side == "param":
        return 1.0
    if slot.side == "out":
        return 0.0
    return 1.0 - len({call.inputs[slot.index] for call in calls}) / len(calls)


def _input_gradients(form: Formulation, name: str, table: BlockTable) -> Expression:
    out: Expression = {}
    for index, value in enumerate(table.block.inputs):
        if value.differentiable:
            number = form.problem.boundary.classes[Slot(name, "in", index)]
            for at, w in zip(form.problem.placements[number], form.w[number], strict=True):
                add(out, {w: table.costs.value_bytes(value.name, at) / form.byte_unit})
    return out


def _one_variable(form: Formulation, terms: Terms) -> Terms:
    """The expression as one variable, for rows that use it often."""
    return {form.model.define(terms): 1.0} if len(terms) > 1 else terms


def unavoidable_saved_bytes(problem: Problem) -> float:
    """Return a lower bound, without a solver, of what is saved from forward to backward: tensors saved beside the results of
    operations that cannot be recomputed. 0 where there is a host to offload to."""
    if problem.cluster.host is not None:
        return 0.0
    least = 0.0
    for name, table in problem.blocks.items():
        recomputable = recomputable_nodes(table.block)
        for node, strategies in table.strategies.items():
            if node not in recomputable:
                extras = [
                    sum(saved.bytes for saved in table.costs.saved_tensors(each.plan) if saved.value == f"{node}+")
                    for each in strategies
                ]
                least += problem.graph.count(name) * min(extras, default=0.0)
    return least


def unavoidable_shortage_bytes(problem: Problem) -> float:
    """Return by how much `unavoidable_saved_bytes` alone exceed the memory budget; negative where they do not."""
    device = problem.cluster.device
    reserved = (1 + fragmentation(device)) * unavoidable_saved_bytes(problem)
    return reserved - tensor_budget_bytes(device, communicator_count(problem.mesh, problem.zero_group))
