"""State sharding (ZeRO) in the ILP: the stage of each block, and the cost of its parameters, gradients and optimizer state under
it.

Seconds and bytes of state depend on the elements on one device, a product of a parameter's placement (w) and the ZeRO stage (z);
``u[parameter, shards, zero]`` makes that product linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from autopar.cost_models.events.memory_terms import STATE_FIELDS
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import StateCost
from autopar.cost_models.state.state_group import MatrixWork, StateGroup, matrix_work, stored_elements
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.tensors.sizes import itemsize, shard_count
from autopar.ir.graph import Parameter
from autopar.ir.placement import Placements
from autopar.solve.ilp.formulation import Expression, Formulation, StateTerms
from autopar.solve.ilp.linear_model import INFINITY, Terms, add, total
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import Problem


def add_zero_stages(form: Formulation) -> None:
    """Add z: one ZeRO stage per block; shared parameters take the largest of their users', at most 2."""
    problem, model = form.problem, form.model
    boundary = problem.boundary
    users = sorted({kind.block for kind in boundary.kind_counts if not all(kind.own)})
    groups = [(name, problem.zeros) for name in problem.blocks]
    groups += [("", tuple(sorted({min(2, zero) for zero in problem.zeros})))] if users else []
    for name, stages in groups:
        if name and not any(not parameter.buffer for parameter in problem.blocks[name].block.parameters):
            stages = stages[:1]
        form.z[name] = {zero: model.binary() for zero in stages}
        # sum_zero z[block, zero] = 1
        model.row([(z, 1.0) for z in form.z[name].values()], 1.0, 1.0)
        model.zero_groups.append(tuple(form.z[name].values()))
    for level in (1, 2) if users else ():

        def at_least(name: str, level: int = level) -> Expression:
            return {z: 1.0 for zero, z in form.z[name].items() if zero >= level}

        for name in users:
            # Z[shared] >= level where Z[block] >= level
            model.row(total((1.0, at_least("")), (-1.0, at_least(name))), 0.0, INFINITY)
        # and only where some user's is
        model.row(total((-1.0, at_least("")), *((1.0, at_least(name)) for name in users)), 0.0, INFINITY)


def add_state_terms(form: Formulation) -> None:
    """Add u, and the costs of every group of parameters: those that a kind of call owns alone, and those that calls share."""
    boundary, blocks = form.problem.boundary, form.problem.blocks
    for name, table in blocks.items():
        slots = [Slot(name, "param", index) for index in range(len(table.block.parameters))]
        parameters = [_stored_parameter(form, slot, form.z[name]) for slot in slots]
        for kind in boundary.kind_counts:
            if kind.block == name:
                own = [each for each, alone in zip(parameters, kind.own, strict=True) if alone]
                form.states[kind] = _state_terms(form, own, form.z[name], table.costs)
    if boundary.shared:
        parameters = [_stored_parameter(form, slot, form.z[""]) for slot in boundary.shared.values()]
        costs = next(iter(blocks.values())).costs
        form.states[None] = _state_terms(form, parameters, form.z[""], costs)


@dataclass(frozen=True, slots=True)
class _StoredParameter:
    """A parameter: `placements` are those it may be stored in, `count` its elements, and `elements` those on one device by ZeRO
    stage, as expressions."""

    parameter: Parameter
    placements: tuple[Placements, ...]
    count: float
    elements: Mapping[int, Terms]

    def extremes(self, sizes: Sequence[int]) -> tuple[float, float]:
        """The least and most elements on one device, over the placements."""
        cuts = [shard_count(at, sizes) for at in self.placements]
        return self.count / max(cuts), self.count / min(cuts)


def _stored_parameter(form: Formulation, slot: Slot, z: Mapping[int, int]) -> _StoredParameter:
    """Return the parameter at a slot, with u where both the number of shards and the ZeRO stage are to be chosen."""
    number = form.problem.boundary.classes[slot]
    parameter, placements = form.problem.boundary.parameter(slot), form.problem.placements[number]
    by_shards: dict[int, list[int]] = {}
    for at, w in zip(placements, form.w[number], strict=True):
        by_shards.setdefault(shard_count(at, form.problem.mesh.sizes), []).append(w)
    count = float(stored_elements(parameter, form.problem.precision))
    return _StoredParameter(parameter, placements, count, _local_elements(form, count, by_shards, z))


def _local_elements(
    form: Formulation, count: float, by_shards: Mapping[int, Sequence[int]], z: Mapping[int, int]
) -> dict[int, Expression]:
    """Return by ZeRO stage the local elements of a parameter of `count`. `by_shards`: the w of placements of so many shards."""
    model = form.model
    if len(z) == 1:
        (zero,) = z
        return {zero: {w: count / cut for cut, chosen in by_shards.items() for w in chosen}}
    if len(by_shards) == 1:
        (cut,) = by_shards
        return {zero: {column: count / cut} for zero, column in z.items()}
    u = {(cut, zero): model.variable(1.0) for cut in by_shards for zero in z}
    for cut, chosen in by_shards.items():
        # sum_zero u[shards, zero] = sum of w over the placements of so many shards
        model.row([*((u[cut, zero], 1.0) for zero in z), *((w, -1.0) for w in chosen)], 0.0, 0.0)
    for zero, column in z.items():
        # sum_shards u[shards, zero] = z[zero]
        model.row([*((u[cut, zero], 1.0) for cut in by_shards), (column, -1.0)], 0.0, 0.0)
    return {zero: {u[cut, zero]: count / cut for cut in by_shards} for zero in z}


@dataclass(frozen=True, slots=True)
class _StatePrices:
    """The seconds of a group under one ZeRO stage, as functions of its elements (all, or trainable) on one device."""

    problem: Problem
    costs: BlockCosts
    zero: int
    matrix_share: float

    def cost(self, elements: float, trainable: float, tensors: int = 0, matrices: MatrixWork | None = None) -> StateCost:
        group = StateGroup(elements, trainable, tensors, matrix_share=self.matrix_share, matrices=matrices or MatrixWork())
        return self.costs.group_state_cost(group, self.zero, self.problem.precision, optimizer_named(self.problem.optimizer))

    def seconds(self, field: str, elements: float) -> float:
        """Return a field of `StateCommunication`: a gather of so many elements, or what is done with so many trainable ones."""
        cost = self.cost(elements, 0.0) if field.startswith("gather") else self.cost(0.0, elements)
        communication = self.costs.state_communication(cost, self.zero, self.problem.precision, self.problem.micro_batches)
        return float(getattr(communication, field))

    def optimizer_constant(self, tensors: int, matrices: MatrixWork) -> float:
        """Return what does not depend on placements: launches, and updates of whole matrices."""
        whole, streaming = self.cost(0.0, 1e-9, tensors, matrices), self.cost(0.0, 1e-9)
        # no more than that: costs of 1e-17 of a step let HiGHS go round in circles
        return whole.optimizer_seconds - streaming.optimizer_seconds


@dataclass(slots=True)
class _GroupTerms:
    """The costs of one group under one ZeRO stage (its column is `z`), added to the terms of the group."""

    form: Formulation
    z: int

    def seconds(
        self,
        into: Expression,
        cost: Callable[[float], float],
        elements: Terms,
        extremes: tuple[float, float],
        bends: Sequence[float] = (),
    ) -> None:
        """Add ``into += cost(elements) z``, by the lower convex envelope of the cost between its extremes."""
        unit = self.form.second_unit
        envelope = _envelope(cost, *extremes, bends)
        lines = [total((slope / unit, elements), (intercept / unit, {self.z: 1.0})) for slope, intercept in envelope]
        if len(lines) == 1:
            add(into, lines[0])
            return
        price = self.form.model.variable()
        for line in lines:
            # price >= slope x elements + intercept x z, for each line of the envelope
            self.form.model.at_least(price, line)
        add(into, {price: 1.0})

    def bytes(self, into: Expression, elements: Terms, bytes_per_element: float) -> None:
        """Add ``into += bytes per element x elements``."""
        if bytes_per_element:
            add(into, elements, bytes_per_element / self.form.byte_unit)


def _envelope(cost: Callable[[float], float], low: float, high: float, bends: Sequence[float]) -> list[tuple[float, float]]:
    """Return (slope, intercept) of each line of the lower convex envelope of a cost that is concave between `bends`: the chord of
    both ends for affine and concave costs, and for measured tables the lower hull of their points (Andrew's monotone chain)."""
    if high <= 0:
        return [(0.0, 0.0)]
    if high - low <= 1e-9 * high:
        return [(0.0, cost(high))]
    hull: list[tuple[float, float]] = []
    for x in (low, *sorted(each for each in bends if low < each < high), high):
        y = cost(x)
        while len(hull) > 1 and _slope(hull[-1], (x, y)) <= _slope(*hull[-2:]):
            hull.pop()
        hull.append((x, y))
    lines = [(_slope(before, after), before) for before, after in pairwise(hull)]
    return [(slope, y - slope * x) for slope, (x, y) in lines]


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def _state_terms(form: Formulation, group: Sequence[_StoredParameter], z: Mapping[int, int], costs: BlockCosts) -> StateTerms:
    """The costs of parameters that are gathered and reduced as one; buffers are never sharded."""
    problem, sizes = form.problem, costs.mesh.sizes
    parameters = [each for each in group if not each.parameter.buffer]
    trainable = [each for each in parameters if each.parameter.trainable]
    buffers = [each for each in group if each.parameter.buffer]
    buffer_bytes = sum(each.count * itemsize(each.parameter.value.dtype) for each in buffers)
    share, matrices = matrix_work([each.parameter for each in parameters])
    out = StateTerms(buffer_bytes=buffer_bytes / form.byte_unit)
    for zero, column in z.items():
        prices = _StatePrices(problem, costs, zero, share)
        terms = _GroupTerms(form, column)
        elements = total(*((1.0, each.elements[zero]) for each in parameters))
        trained = total(*((1.0, each.elements[zero]) for each in trainable))
        extremes, trained_extremes = _extremes(parameters, sizes), _extremes(trainable, sizes)
        gathers, reductions = costs.state_price_bends(zero, problem.precision, optimizer_named(problem.optimizer))
        for field in ("gather_first", "gather_backward"):
            terms.seconds(out[field], partial(prices.seconds, field), elements, extremes, gathers)
        each = ("reduce_each", "accumulate_seconds") if problem.micro_batches > 1 else ()
        for field in ("reduce_last", *each, "optimizer_seconds"):
            bends = reductions if field.startswith("reduce") else ()
            terms.seconds(out[field], partial(prices.seconds, field), trained, trained_extremes, bends)
        if trained_extremes[1]:
            add(out["optimizer_seconds"], {column: prices.optimizer_constant(len(trainable), matrices) / form.second_unit})
        memory = prices.cost(1.0, 1.0, len(parameters)).memory
        terms.bytes(out["parameters"], elements, memory.parameters)
        terms.bytes(out["optimizer"], trained, memory.optimizer)
        for field in STATE_FIELDS:
            of = elements if field.startswith("gathered") else trained
            terms.bytes(out[field], of, getattr(memory, field))
    return out


def _extremes(parameters: Sequence[_StoredParameter], sizes: Sequence[int]) -> tuple[float, float]:
    """The least and most elements of all of them on one device."""
    low = high = 0.0
    for each in parameters:
        least, most = each.extremes(sizes)
        low, high = low + least, high + most
    return low, high
