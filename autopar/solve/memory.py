"""The memory constraint: what the blocks keep and hold, as rows of the moments of `cost_models.peak`.

What is not linear (which calls share a boundary tensor) is counted at its least, so that the rows never forbid a plan that fits;
a plan that then does not fit is met by `candidates`, which tightens the capacity.
"""

from __future__ import annotations

from autopar.cost_models.memory import OFFLOAD_WINDOW, arc_bytes, made_bytes, momentary_bytes, working_bytes
from autopar.ir.plan import Arc
from autopar.solve.boundary import Boundary, Slot
from autopar.solve.formulation import Formulation
from autopar.solve.linear import INFINITY, Terms, add, total
from autopar.solve.moments import Kept, moments
from autopar.solve.problem import BlockTable, Problem
from autopar.solve.replay import Storages, boundary_states, replayable, storages


def limit(made: Formulation, margin_bytes: float = 0.0, minimise_excess: bool = False) -> None:
    """Adds ``every moment <= capacity - margin``, tensors and base, the allocator's slack left out. With `minimise_excess` the
    objective becomes by how much that fails instead."""
    device = made.problem.cluster.device
    capacity = (device.base_bytes + device.room_bytes - margin_bytes) / made.byte_unit
    excess = made.model.variable()
    if minimise_excess:
        made.model.cost = [0.0] * made.model.variables
        made.model.cost[excess] = 1.0
    else:
        made.model.upper[excess] = 0.0
    kept = Kept()
    for name, table in made.problem.blocks.items():
        if name not in made.storages:
            made.storages[name] = storages(made, name, table, decide=False)
        _kept_of(made, name, table, made.storages[name], kept)
    for terms, constant in moments(made, kept):
        # state + kept + gathered + working + gradients <= capacity + excess
        made.model.row(total((1.0, terms), (-1.0, {excess: 1.0})), -INFINITY, capacity - constant)
    _host(made)


def _host(made: Formulation) -> None:
    host, byte = made.problem.cluster.host, made.byte_unit
    waiting: dict[int, float] = {}
    for name, each in made.storages.items():
        add(waiting, each.host_bytes(), made.problem.graph.count(name))
    if host is not None and waiting:
        # sum_calls sum_t O[t] * bytes <= what the host has for one device
        made.model.row(waiting, -INFINITY, host.capacity_bytes / byte)


def least_kept_bytes(problem: Problem) -> float:
    """Below what any plan keeps from forward to backward: results of operations that cannot run again, where there is no host to
    move them to. A look without a solver."""
    if problem.cluster.host is not None:
        return 0.0
    least = 0.0
    for name, table in problem.blocks.items():
        ready = replayable(table.block)
        for node, choices in table.choices.items():
            if node not in ready:
                extras = [
                    sum(kept.bytes for kept in table.costs.kept(choice.plan) if kept.value == f"{node}+") for choice in choices
                ]
                least += problem.graph.count(name) * min(extras, default=0.0)
    return least


def _kept_of(made: Formulation, name: str, table: BlockTable, of: Storages, out: Kept) -> None:
    model, byte, costs = made.model, made.byte_unit, table.costs
    ends = {of.same.find((value, at)): (slot, w) for slot, value, at, w in boundary_states(made, table)}
    internal: dict[int, float] = {}
    for state, s in of.kept.items():
        size = of.sizes[state]
        slot, w = ends.get(state, (None, {}))
        if slot is None:
            add(internal, {s: size})
            continue
        if slot.side != "param":
            out.tensors.append((slot, state, size, s))
        extra = _extra_calls(made.problem.boundary, slot)
        if extra:
            # E[t] >= S[t] - w: converted inside, so each call keeps its own
            own = model.variable(1.0)
            model.at_least(own, total((1.0, {s: 1.0}), (-1.0, w)))
            add(internal, {own: size * extra})
    out.internal[name] = {model.define(internal): 1.0} if internal else {}
    passing = {m: of.sizes[state] for state, m in of.passing.items()}
    window = of.host_bytes()
    working, moment = model.variable(), model.variable()
    forward: dict[int, float] = {}
    for node, choices in table.choices.items():
        pairs = list(zip(choices, made.x[name, node], strict=True))
        # working >= sum_s x * working set, moment >= sum_s x * momentary bytes, for every operation
        model.at_least(working, {x: working_bytes(costs, choice.plan) / byte for choice, x in pairs})
        model.at_least(moment, {x: momentary_bytes(costs, choice.plan) / byte for choice, x in pairs})
        add(forward, {x: made_bytes(costs, choice.plan) / byte for choice, x in pairs})
    for value, moves in table.moves.items():
        for step, y in zip(moves.steps, made.y[name, value], strict=True):
            size = arc_bytes(costs, Arc(value, moves.states[step.source], moves.states[step.target]))
            add(forward, {y: size / byte} if size else {})
    gradients: dict[int, float] = {}
    for index, given in enumerate(table.block.inputs):
        if given.differentiable:
            number = made.problem.boundary.classes[Slot(name, "in", index)]
            for at, w_p in zip(made.problem.placements[number], made.w[number], strict=True):
                add(gradients, {w_p: costs.value_bytes(given.name, at) / byte})
    out.made[name] = _one(made, total((1.0, forward), (1.0, {moment: 1.0}), (OFFLOAD_WINDOW - 1, window)))
    out.ending[name] = _one(made, gradients)
    out.working[name] = _one(made, total((1.0, {working: 1.0}), (1.0, gradients), (1.0, passing), (OFFLOAD_WINDOW, window)))


def _one(made: Formulation, terms: Terms) -> Terms:
    """The expression as one variable, for rows that use it often."""
    return {made.model.define(terms): 1.0} if len(terms) > 1 else terms


def _extra_calls(boundary: Boundary, slot: Slot) -> float:
    """How many more calls the block has than distinct tensors come in at the slot, as a share of its calls."""
    calls = [call for call in boundary.graph.calls if call.block == slot.block]
    if slot.side == "param":
        return 1.0
    if slot.side == "out":
        return 0.0
    return 1.0 - len({call.inputs[slot.index] for call in calls}) / len(calls)
