"""The storages of a block in the ILP: which placed values are one tensor in memory, and which are between blocks."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cost_models.tensors.aliases import Aliases, aliases
from autopar.ir.placement import Placements
from autopar.ir.plan import Conversion
from autopar.rules.conversions import axis_conversion
from autopar.solve.ilp.formulation import Formulation
from autopar.solve.ilp.linear_model import Terms
from autopar.solve.problem.boundary import Slot, block_slots
from autopar.solve.problem.problem import BlockTable


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
