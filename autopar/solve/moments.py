"""The moments of `cost_models.peak` as linear rows over the solver's variables.

Moments that another one dominates are left out: along a run of equal calls the sum is linear, so its ends suffice; that keeps
the number of rows independent of depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.cost_models.sizes import held_by_user
from autopar.cost_models.storages import State
from autopar.solve.boundary import Boundary, Slot
from autopar.solve.formulation import Formulation
from autopar.solve.linear import Terms, add, total


@dataclass(slots=True)
class Kept:
    """Per block, as expressions in units of bytes: what a call keeps that no other call has (`internal`), what its forward makes
    (`made`), what its backward holds beside what is kept (`working`), and when that ends (`ending`). `tensors` between calls:
    (where the kept tensor is read, its state, bytes, variable)."""

    internal: dict[str, Terms] = field(default_factory=dict)
    made: dict[str, Terms] = field(default_factory=dict)
    working: dict[str, Terms] = field(default_factory=dict)
    ending: dict[str, Terms] = field(default_factory=dict)
    tensors: list[tuple[Slot, State, float, int]] = field(default_factory=list)


def moments(made: Formulation, kept: Kept) -> Iterator[tuple[dict[int, float], float]]:
    """(expression, constant) of each moment that no other one dominates, in units of bytes. Left out, since they are rarely the
    largest: weights that arrive for a backward, and the sum of a shared weight's gradients."""
    boundary, states, byte = made.problem.boundary, made.states, made.byte_unit
    device = made.problem.cluster.device
    counts = {key: float(boundary.kind_counts[key]) if key is not None else 1.0 for key in states}
    every = {
        name: total(*((counts[key], getattr(state, name)) for key, state in states.items()))
        for name in ("parameters", "optimizer_bytes", "gradients", "gathered_standing", "standing", "accumulated")
    }
    inputs = held_by_user(made.problem.graph, made.problem.micro_batches * made.problem.batch, made.problem.mesh)
    constant = (device.base_bytes + inputs) / byte + sum(counts[key] * state.buffer_bytes for key, state in states.items())
    fixed = total((1.0, every["parameters"]), (1.0, every["optimizer_bytes"]))
    yield total((1.0, fixed), (1.0, every["gradients"]), (float(device.kind != "cpu"), every["parameters"])), constant
    root = states.get(None)
    several = made.problem.micro_batches > 1
    base = total((1.0, fixed), (1.0, every["gathered_standing"]), (1.0, every["standing"]))
    if several:
        add(base, every["accumulated"])
    if root is not None:
        add(base, root.gathered_passing)
    base = {made.model.define(base): 1.0}
    last = _last_keepers(boundary, kept)
    for index, backward in _instants(boundary):
        before, until = (_kept_until(made, kept, last, at) for at in (index - 1, index))
        rows = _backward(made, kept, index, before, until) if backward else [_forward(made, kept, index, before)]
        yield from ((total((1.0, base), (1.0, row)), constant) for row in rows)


def _forward(made: Formulation, kept: Kept, index: int, before: Terms) -> dict[int, float]:
    """kept(calls < i) + made[i] + weights, and (unless they are there from an earlier micro-batch) the buffer they arrived in."""
    kind = made.problem.boundary.kinds[index]
    row = total((1.0, before), (1.0, kept.made[kind.block]), (2.0, made.states[kind].gathered_passing))
    if made.problem.micro_batches == 1:
        add(row, made.states[kind].gathered_standing)
    return row


def _backward(made: Formulation, kept: Kept, index: int, before: Terms, until: Terms) -> Iterator[dict[int, float]]:
    """While it runs, and when it ends (once with the buffer of its own reduction, once with that of the call after it)."""
    kinds, states = made.problem.boundary.kinds, made.states
    kind, root, several = kinds[index], states.get(None), made.problem.micro_batches > 1
    state, after = states[kind], states[kinds[index + 1]] if index + 1 < len(kinds) else None
    shared: dict[int, float] = {}
    if index:
        add(shared, states[kinds[index - 1]].gathered_passing)
    if not several:
        for each in dict.fromkeys(kinds[index + 1 :]):
            add(shared, states[each].gradients, kinds[index + 1 :].count(each))
            add(shared, states[each].standing, -float(kinds[index + 1 :].count(each)))
    held = total((1.0, root.unreduced), (1.0, root.gradients_in_place)) if root is not None else {}
    # kept(calls <= i) + working[i] + weights[i, i - 1] + reducing[i + 1] + gradients(calls > i)
    row = total((1.0, shared), (1.0, until), (1.0, kept.working[kind.block]), (1.0, state.gathered_passing))
    if after is not None:
        add(row, after.reducing_behind)
        add(row, held)
    yield row
    # kept(calls <= i) + gradients of what it made + its weights and the buffer they arrive in
    row = total((1.0, until), (1.0, kept.ending[kind.block]), (2.0, state.gathered_passing))
    if not several:
        add(row, shared)
        add(row, states[kinds[index - 1]].gathered_passing if index else {}, -1.0)
    if after is not None:
        add(row, after.reducing_behind)
        add(row, held)
    yield row
    if not index and root is not None and after is not None:
        # the last gradient of a shared weight is added to the sum of the others, which makes a third
        row = total((1.0, shared), (1.0, until), (1.0, kept.ending[kind.block]), (3.0, held), (1.0, state.gathered_passing))
        yield total((1.0, row), (1.0, after.reducing_behind))
    # kept(calls < i) + gradients of the inputs, of the weights unsharded, and (where nothing is sharded) for good
    row = total((1.0, shared), (1.0, before), (1.0, kept.ending[kind.block]), (1.0, state.unreduced), (1.0, held))
    add(row, state.gradients_in_place)
    yield total((1.0, row), (1.0, state.reducing))
    if after is not None and kinds[index + 1] != kind:
        yield total((1.0, row), (1.0, after.reducing_behind))


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


def _last_keepers(boundary: Boundary, kept: Kept) -> dict[str, int]:
    """Graph value -> the last call that may keep it."""
    slots = {slot for slot, *_ in kept.tensors}
    out: dict[str, int] = {}
    for index, call in enumerate(boundary.graph.calls):
        for side, names in (("in", call.inputs), ("out", call.outputs)):
            for number, name in enumerate(names):
                if Slot(call.block, side, number) in slots:  # type: ignore[arg-type]
                    out[name] = index
    return out


def _kept_until(made: Formulation, kept: Kept, last: dict[str, int], index: int) -> dict[int, float]:
    """What the calls up to `index` keep. A tensor between calls counts once, by the most that any of its readers says."""
    boundary = made.problem.boundary
    done = [kind.block for kind in boundary.kinds[: index + 1]]
    out: dict[int, float] = {}
    for name in dict.fromkeys(done):
        add(out, kept.internal[name], done.count(name))
    for slots, count in _groups(boundary, kept, last, index).items():
        add(out, {_group_bytes(made, kept, slots): 1.0}, count)
    return out


def _groups(boundary: Boundary, kept: Kept, last: dict[str, int], index: int) -> dict[frozenset[Slot], int]:
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


def _group_bytes(made: Formulation, kept: Kept, slots: frozenset[Slot]) -> int:
    """G[slots] >= sum of bytes x S over the tensors kept at one slot, for each slot."""
    variable = made.groups.get(slots)
    if variable is None:
        variable = made.groups[slots] = made.model.variable()
        for slot in slots:
            made.model.at_least(variable, {s: size for at, _, size, s in kept.tensors if at == slot})
    return variable
