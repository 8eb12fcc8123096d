"""The memory constraint: the moments of `cost_models.memory.peak_memory` as linear rows over the solver's variables.

Moments that another one dominates are left out: along a run of equal calls the sum is linear, so its ends suffice; that keeps
the number of rows independent of depth. What is not linear (which calls share a boundary tensor) is counted at its least, so
that the rows never forbid a plan that fits; a plan that then does not fit is met by `search`, which tightens the capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.memory import State, aliases, kept_tensors, working_bytes
from autopar.ir.placement import Placements
from autopar.ir.plan import Arc
from autopar.rules.conversions import conversion
from autopar.solve.boundary import Boundary, Slot
from autopar.solve.formulation import Formulation
from autopar.solve.linear import INFINITY, Terms, add, total
from autopar.solve.problem import BlockTable, Choice, Problem


@dataclass(slots=True)
class _Kept:
    """`internal` per call of a block; `boundary` per class and storage: (where the kept tensor is read, bytes, variable)."""

    internal: dict[str, Terms]
    working: dict[str, int]
    tensors: list[tuple[Slot, State, float, int]]


def limit(made: Formulation, margin_bytes: float = 0.0, minimise_excess: bool = False) -> None:
    """Adds ``every moment <= capacity - margin``. With `minimise_excess` the objective becomes by how much that fails instead."""
    capacity = (made.problem.cluster.device.memory_bytes - margin_bytes) / made.byte_unit
    excess = made.model.variable()
    if minimise_excess:
        made.model.cost = [0.0] * made.model.variables
        made.model.cost[excess] = 1.0
    else:
        made.model.upper[excess] = 0.0
    kept = _kept(made)
    for terms, constant in _moments(made, kept):
        # state + kept + gathered + working + gradients <= capacity + excess
        made.model.row(total((1.0, terms), (-1.0, {excess: 1.0})), -INFINITY, capacity - constant)


def least_kept_bytes(problem: Problem) -> float:
    """Below what any plan keeps from forward to backward: of each storage that is not shared between calls, the smallest part
    that the node which keeps most of it may keep. A look without a solver."""
    kept = 0.0
    for name, table in problem.blocks.items():
        if name in problem.recompute:
            continue
        storage = {value: value for value in table.block.values()}
        for node in table.block.nodes:  # in order, so that the operand's storage is final
            if packet(node.op) in VIEWS and node.operands():
                storage.update((output.name, storage[node.operands()[0]]) for output in node.outputs)
        shared = {storage[value.name] for value in table.block.inputs} | {storage[value] for value in table.block.outputs}
        shared |= {storage[parameter.value.name] for parameter in table.block.parameters}
        least: dict[str, float] = {}
        for choices in table.choices.values():
            for value, size in _least_of(table, choices).items():
                where = storage.get(value, value)
                if where not in shared:
                    least[where] = max(least.get(where, 0.0), size)
        kept += problem.graph.count(name) * sum(least.values())
    return kept


def _least_of(table: BlockTable, choices: tuple[Choice, ...]) -> dict[str, float]:
    """Per value the fewest bytes that any strategy of one node keeps; not those that some strategy does not keep at all."""
    found = [{kept.value: kept.bytes for kept in table.costs.kept(choice.plan)} for choice in choices]
    return {value: min(each[value] for each in found) for value in found[0] if all(value in each for each in found)}


def _kept(made: Formulation) -> _Kept:
    out = _Kept({}, {}, [])
    for name, table in made.problem.blocks.items():
        _kept_of(made, name, table, out)
    return out


def _kept_of(made: Formulation, name: str, table: BlockTable, out: _Kept) -> None:
    block, model, byte = table.block, made.model, made.byte_unit
    plans = [choice.plan for choices in table.choices.values() for choice in choices]
    free = [
        Arc(value, moves.states[step.source], moves.states[step.target])
        for value, moves in table.moves.items()
        for step in moves.steps
        if step.alias and _free(table, value, moves.states[step.source], moves.states[step.target])
    ]
    same = aliases(block, plans, free)
    keepers: dict[State, dict[str, dict[int, float]]] = {}
    sizes: dict[State, float] = {}
    working = model.variable()
    for node, choices in table.choices.items():
        for choice, x in zip(choices, made.x[name, node], strict=True):
            for state, size in kept_tensors(table.costs, same, choice.plan):
                keepers.setdefault(state, {}).setdefault(node, {})[x] = 1.0
                sizes[state] = size / byte
        # working >= sum_s x * working set, for every node
        model.at_least(
            working,
            {x: working_bytes(table.costs, c.plan) / byte for c, x in zip(choices, made.x[name, node], strict=True)},
        )
    ends = {same.find((slot_value, at)): (slot, w) for slot, slot_value, at, w in _ends(made, table)}
    internal: dict[int, float] = {}
    recompute = name in made.problem.recompute
    for state, by_node in keepers.items():
        if not sizes[state]:
            continue
        s = model.variable(1.0)
        for terms in by_node.values():
            # S[tensor] >= x that keeps it, for every node
            model.at_least(s, terms)
        slot, w = ends.get(state, (None, {}))
        if recompute:
            if slot is None or slot.side == "out":
                add(internal, {s: sizes[state]})
            continue
        if slot is None:
            add(internal, {s: sizes[state]})
            continue
        if slot.side != "param":
            out.tensors.append((slot, state, sizes[state], s))
        extra = _extra_calls(made.problem.boundary, slot)
        if extra:
            # E[tensor] >= S[tensor] - w: converted inside, so each call keeps its own
            own = model.variable(1.0)
            model.at_least(own, total((1.0, {s: 1.0}), (-1.0, w)))
            add(internal, {own: sizes[state] * extra})
    again = internal if recompute else {}
    out.internal[name] = {model.define(internal): 1.0} if internal and not recompute else {}
    if recompute:
        out.tensors += _inputs_kept(made, table)
    gradients: dict[int, float] = {}
    for index, value in enumerate(block.inputs):
        if value.differentiable:
            number = made.problem.boundary.classes[Slot(name, "in", index)]
            for at, w_p in zip(made.problem.placements[number], made.w[number], strict=True):
                add(gradients, {w_p: table.costs.value_bytes(value.name, at) / byte})
    out.working[name] = model.define(total((1.0, {working: 1.0}), (1.0, gradients), (1.0, again)))


def _inputs_kept(made: Formulation, table: BlockTable) -> Iterator[tuple[Slot, State, float, int]]:
    """What a recomputed block keeps: its inputs as they come."""
    for slot, value, at, w in _ends(made, table):
        if slot.side == "in":
            state = value, at
            yield slot, state, table.costs.value_bytes(*state) / made.byte_unit, next(iter(w))


def _free(table: BlockTable, value: str, source: object, target: object) -> bool:
    axis = next(i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)  # type: ignore[call-overload]
    how = conversion(source[axis], target[axis], table.costs.values[value].differentiable)  # type: ignore[index]
    return how is not None and how.forward is None


def _ends(made: Formulation, table: BlockTable) -> Iterator[tuple[Slot, str, Placements, Terms]]:
    """Boundary states with the variables that say that the boundary is there; inputs last, so that they name a storage."""
    block, boundary = table.block, made.problem.boundary
    sides = (
        ("out", block.outputs),
        ("in", tuple(value.name for value in block.inputs)),
        ("param", tuple(parameter.value.name for parameter in block.parameters)),
    )
    for side, names in sides:
        for index, name in enumerate(names):
            slot = Slot(block.name, side, index)  # type: ignore[arg-type]
            number = boundary.classes[slot]
            for at, w in zip(made.problem.placements[number], made.w[number], strict=True):
                yield slot, name, at, {w: 1.0}


def _extra_calls(boundary: Boundary, slot: Slot) -> float:
    """How many more calls the block has than distinct tensors come in at the slot, as a share of its calls."""
    calls = [call for call in boundary.graph.calls if call.block == slot.block]
    if slot.side == "param":
        return 1.0
    if slot.side == "out":
        return 0.0
    return 1.0 - len({call.inputs[slot.index] for call in calls}) / len(calls)


def _moments(made: Formulation, kept: _Kept) -> Iterator[tuple[dict[int, float], float]]:
    """(expression, constant) of each moment that no other one dominates, in units of bytes."""
    boundary, states, byte = made.problem.boundary, made.states, made.byte_unit
    kinds, device = boundary.kinds, made.problem.cluster.device
    fixed: dict[int, float] = {}
    parameters: dict[int, float] = {}
    gradients: dict[int, float] = {}
    constant = device.base_bytes / byte
    for key, state in states.items():
        count = boundary.kind_counts[key] if key is not None else 1
        add(parameters, state.parameters, count)
        add(fixed, state.optimizer_bytes, count)
        add(gradients, state.gradients, count)
        constant += state.buffer_bytes * count
    add(fixed, parameters)
    foreach = device.kind != "cpu"
    yield total((1.0, fixed), (1.0, gradients), (float(foreach), parameters)), constant
    root = states.get(None)
    standing = total(
        *((float(boundary.kind_counts[key]), state.gathered_standing) for key, state in states.items() if key is not None)
    )
    if root is not None:
        standing = total((1.0, standing), (1.0, root.gathered_standing), (1.0, root.gathered_passing))
    base = made.model.define(total((1.0, fixed), (1.0, standing)))
    last = _last_keepers(boundary, kept)
    for index, backward in _instants(boundary):
        kind = kinds[index]
        beside = index - 1 if backward else index + 1
        moment = total((1.0, {base: 1.0, kept.working[kind.block]: 1.0}), (1.0, states[kind].gathered_passing))
        if 0 <= beside < len(kinds):
            add(moment, states[kinds[beside]].gathered_passing)
        add(moment, _kept_until(made, kept, last, index))
        if backward:
            add(moment, states[kind].reduced)
            if index + 1 < len(kinds):
                add(moment, states[kinds[index + 1]].reduced)
            for each in dict.fromkeys(kinds[index:]):
                add(moment, states[each].gradients, kinds[index:].count(each))
            if root is not None:
                add(moment, root.reduced)
                add(moment, root.gradients)
        yield moment, constant


def _instants(boundary: Boundary) -> list[tuple[int, bool]]:
    """(call, backward): forward the last call of each neighbourhood, backward the first and the last."""
    kinds = [None, *boundary.kinds, None]
    forward: dict[object, int] = {}
    first: dict[object, int] = {}
    final: dict[object, int] = {}
    for index in range(len(boundary.kinds)):
        forward[kinds[index + 1], kinds[index + 2]] = index
        around = tuple(kinds[index : index + 3])
        first.setdefault(around, index)
        final[around] = index
    out = [(index, False) for index in forward.values()]
    return out + [(index, True) for index in sorted({*first.values(), *final.values()})]


def _last_keepers(boundary: Boundary, kept: _Kept) -> dict[str, int]:
    """Graph value -> the last call that may keep it."""
    slots = {slot for slot, *_ in kept.tensors}
    out: dict[str, int] = {}
    for index, call in enumerate(boundary.graph.calls):
        for side, names in (("in", call.inputs), ("out", call.outputs)):
            for number, name in enumerate(names):
                if Slot(call.block, side, number) in slots:  # type: ignore[arg-type]
                    out[name] = index
    return out


def _kept_until(made: Formulation, kept: _Kept, last: dict[str, int], index: int) -> dict[int, float]:
    """What the calls up to `index` keep. A tensor between calls counts once, by the most that any of its readers says."""
    boundary = made.problem.boundary
    done = [kind.block for kind in boundary.kinds[: index + 1]]
    out: dict[int, float] = {}
    for name in dict.fromkeys(done):
        add(out, kept.internal[name], done.count(name))
    for slots, count in _groups(boundary, kept, last, index).items():
        add(out, {_group_bytes(made, kept, slots): 1.0}, count)
    return out


def _groups(boundary: Boundary, kept: _Kept, last: dict[str, int], index: int) -> dict[frozenset[Slot], int]:
    """How many graph values are there by then, by the slots that may keep them."""
    keeping = {slot for slot, *_ in kept.tensors}
    readers: dict[str, set[Slot]] = {}
    for call in boundary.graph.calls:
        for side, names in (("in", call.inputs), ("out", call.outputs)):
            for number, name in enumerate(names):
                slot = Slot(call.block, side, number)  # type: ignore[arg-type]
                if slot in keeping and last[name] <= index:
                    readers.setdefault(name, set()).add(slot)
    out: dict[frozenset[Slot], int] = {}
    for slots in readers.values():
        out[frozenset(slots)] = out.get(frozenset(slots), 0) + 1
    return out


def _group_bytes(made: Formulation, kept: _Kept, slots: frozenset[Slot]) -> int:
    """G[slots] >= sum of bytes x S over the tensors kept at one slot, for each slot."""
    variable = made.groups.get(slots)
    if variable is None:
        variable = made.groups[slots] = made.model.variable()
        for slot in slots:
            made.model.at_least(variable, {s: size for at, _, size, s in kept.tensors if at == slot})
    return variable
