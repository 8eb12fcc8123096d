"""The storages of a block in the ILP: which placed values are one tensor in memory, and which are between blocks; and activation
partition (ZeRO-R): ``P[t, a]``, storage t is saved in parts over model axis a, and gathered in the backward.

Only storages that are replicated on the axis, of values that no operation makes sharded there, have such a variable: the others
are saved in parts by the choice of placements, and what a conversion gathers is recomputed from its shard.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.hardware.mesh_links import shares_data_links
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue, aliases
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.partition_saved import replicated_on
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import Conversion
from autopar.rules.conversions import axis_conversion
from autopar.solve.ilp.formulation import Expression, Formulation, StorageVariables
from autopar.solve.ilp.linear_model import Terms, total
from autopar.solve.problem.boundary import Slot, block_slots
from autopar.solve.problem.problem import BlockTable, Problem, StreamSeconds


def storage_names(table: BlockTable) -> Aliases:
    """Return the aliases over all strategies and all conversions without communication."""
    plans = [strategy.plan for strategies in table.strategies.values() for strategy in strategies]
    free = [
        Conversion(value, conversions.states[edge.source], conversions.states[edge.target])
        for value, conversions in table.conversions.items()
        for edge in conversions.edges
        if edge.alias and _shares_storage(table, value, conversions.states[edge.source], conversions.states[edge.target])
    ]
    return aliases(table.block, plans, free)


def _shares_storage(table: BlockTable, value: str, source: Placements, target: Placements) -> bool:
    axis = next(i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
    how = axis_conversion(source[axis], target[axis], table.costs.values[value].differentiable)
    return how is not None and how.forward is None


def boundary_values(form: Formulation, table: BlockTable) -> Iterator[tuple[Slot, str, Placements, Terms]]:
    """Yield placed values between blocks, with the variables of the boundary there; inputs last, so that they name a storage."""
    for slot, name in sorted(block_slots(table.block), key=lambda pair: pair[0].side != "out"):
        number = form.problem.boundary.classes[slot]
        for at, w in zip(form.problem.placements[number], form.w[number], strict=True):
            yield slot, name, at, {w: 1.0}


_MIN_BYTES = 0.1
"""Storages that take less of the device's memory than this, in units of bytes (hundredths of it), in all calls of a micro-batch
are not worth a collective."""


def partition_axes(problem: Problem, table: BlockTable) -> dict[str, tuple[int, ...]]:
    """Return per value of the block the model axes of several ranks on which nothing makes it sharded."""
    mesh = problem.mesh
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1 and mesh.names[axis] != DATA_AXIS]
    out: dict[str, tuple[int, ...]] = {}
    for value, placements in _produced(problem, table) if axes else ():
        left = tuple(axis for axis in axes if not any(isinstance(at[axis], Shard) for at in placements))
        if left:
            out[value] = left
    return out


def _worth_it(problem: Problem, block: str, size: float) -> bool:
    return size * problem.graph.count(block) >= _MIN_BYTES


def _produced(problem: Problem, table: BlockTable) -> Iterator[tuple[str, tuple[Placements, ...]]]:
    """Yield each value that is no parameter, and the placements that it may be produced in; without inputs of the batch, which
    the caller holds whole."""
    graph, name = problem.graph, table.block.name
    batch = {value.name for value in graph.inputs}
    for index, value in enumerate(table.block.inputs):
        if any(call.block == name and call.inputs[index] in batch for call in graph.calls):
            continue
        yield value.name, problem.placements[problem.boundary.classes[Slot(name, "in", index)]]
    for node in table.block.nodes:
        for index, value in enumerate(node.outputs):
            yield value.name, tuple(each.plan.results[index] for each in table.strategies[node.name])


def add_partition(
    form: Formulation, table: BlockTable, out: StorageVariables, storage: PlacedValue, axes: tuple[int, ...], is_input: Terms
) -> Expression:
    """Add P of a storage over each axis, with its seconds. `is_input`: whether it is an input of the block, as an expression."""
    parts: Expression = {}
    if not _worth_it(form.problem, table.block.name, out.sizes[storage]):
        return parts
    for axis in axes:
        if not replicated_on(storage[1], axis):
            continue
        p = out.partitioned[storage, axis] = form.model.binary()
        parts[p] = 1.0
        copy, gather = table.costs.partition_seconds(axis, out.sizes[storage] * form.byte_unit)
        shared = shares_data_links(form.problem.cluster, form.problem.mesh, axis)
        out.seconds.append((p, StreamSeconds(copy, gather, 0.0, gather if shared else 0.0)))
        if is_input:
            # G[t, a] >= P[t, a] + given - 1: nothing but the call holds the whole input
            held = out.partitioned_inputs[storage, axis] = form.model.variable(1.0)
            form.model.at_least(held, total((1.0, {p: 1.0}), (1.0, is_input)), -1.0)
    return parts
