"""Time in the ILP: what a block call takes, and the sum over the step with transfers behind the calls."""

from __future__ import annotations

from collections.abc import Callable

from autopar.solve.formulation import Formulation
from autopar.solve.linear import Terms, add, total
from autopar.solve.problem import BlockTable, Seconds
from autopar.solve.state import StateTerms


def block_seconds(made: Formulation, name: str, table: BlockTable) -> None:
    """main = sum_s x (compute + inner collectives) + sum_step y (conversion), and the part of it on the data axis' links."""
    spent: list[dict[int, float]] = [{}, {}, {}, {}]

    def spend(variable: int, seconds: Seconds) -> None:
        each = (seconds.forward, seconds.backward, seconds.forward_shared, seconds.backward_shared)
        for terms, value in zip(spent, each, strict=True):
            if value:
                add(terms, {variable: value / made.second_unit})

    for node, choices in table.choices.items():
        for choice, x in zip(choices, made.x[name, node], strict=True):
            spend(x, choice.seconds)
    for value, moves in table.moves.items():
        for step, y in zip(moves.steps, made.y[name, value], strict=True):
            spend(y, step.seconds)
    kept = made.storages.get(name)
    for seconds, variable in kept.again if kept is not None else ():
        # what runs again, the backward runs before its first gradient
        spend(variable, Seconds(0.0, seconds.forward, 0.0, seconds.forward_shared))
    forward, backward, forward_shared, backward_shared = spent
    many = made.problem.mesh.sizes[0] > 1
    away, back = _host_seconds(made, name, table)
    made.forward[name] = (
        _longer(made, forward, away),
        {made.model.define(forward_shared): 1.0} if many and forward_shared else {},
    )
    made.backward[name] = (
        _longer(made, backward, back),
        {made.model.define(backward_shared): 1.0} if many and backward_shared else {},
    )


def _host_seconds(made: Formulation, name: str, table: BlockTable) -> tuple[Terms, Terms]:
    """What the host link is busy with behind one call: tensors that go there in the forward and come back in the backward."""
    hosted = made.storages[name].host_bytes() if name in made.storages else {}
    away, back = table.costs.offload_seconds(made.byte_unit) if hosted else (0.0, 0.0)
    return total((away / made.second_unit, hosted)), total((back / made.second_unit, hosted))


def _longer(made: Formulation, main: Terms, host: Terms) -> int:
    if not host:
        return made.model.define(main)
    # t >= main, t >= transfers to or from the host
    longer = made.model.variable()
    made.model.at_least(longer, main)
    made.model.at_least(longer, host)
    return longer


def timeline(made: Formulation) -> None:
    """step = first gather + first forward + (m - 1) (backward + later forward) + last backward + last reduction + optimizer.

    All later forwards are equal, and all backwards but the last (see `cost_models.simulate`).
    """
    model, boundary, states, many = made.model, made.problem.boundary, made.states, made.problem.micro_batches
    first, root = states[boundary.kinds[0]], states.get(None)
    model.minimise(first.gather_forward)
    model.minimise(first.reduce)
    if root is not None:
        model.minimise(root.gather_forward)
        model.minimise(root.reduce)
    model.minimise(_forward(made, lambda state: state.gather_forward)[0])
    model.minimise(_backward(made, lambda state: state.reduce))
    if many > 1:
        steps, sent = _forward(made, lambda state: state.gather_backward)
        half = model.variable()
        overlap = made.problem.cluster.overlap
        last = first.reduce_each if root is None else total((1.0, first.reduce_each), (1.0, root.reduce_each))
        behind = last if overlap.reductions_behind else {}
        # half >= sum of t, slowed by the last reductions of the micro-batch before
        model.at_least(half, total((1.0, steps), (overlap.contention, behind)))
        # half >= all transfers: gathers, what is exposed on their link, and those reductions
        model.at_least(half, total((1.0, sent), (1.0, behind)))
        model.minimise({half: float(many - 1)})
        if not overlap.reductions_behind:
            model.minimise(total((float(many - 1), last)))
        model.minimise(total((float(many - 1), _backward(made, lambda state: state.reduce_each))))
    for key, state in states.items():
        streaming, launching = state.optimizer
        if streaming:
            # optimizer = streaming of the local shard + launches (of a CPU)
            count = float(boundary.kind_counts[key] if key is not None else 1)
            model.minimise(total((count, streaming), (count, launching)))


def _forward(made: Formulation, gather: Callable[[StateTerms], Terms]) -> tuple[Terms, Terms]:
    """One forward, the gather of the next call behind each call: seconds, and seconds of all transfers on the link."""
    parts: list[tuple[float, Terms]] = []
    sent: list[tuple[float, Terms]] = []
    behind = made.problem.cluster.overlap.gathers_behind
    for (kind, after), count in made.problem.boundary.forward_steps.items():
        main, shared = made.forward[kind.block]
        moved = gather(made.states[after]) if after is not None else {}
        hidden = moved if behind else {}
        parts.append((float(count), _step(made, {main: 1.0}, hidden, shared)))
        parts.append((0.0 if behind else float(count), moved))
        sent += [(float(count), moved), (float(count), shared)]
    return total(*parts), total(*sent)


def _backward(made: Formulation, reduce: Callable[[StateTerms], Terms]) -> Terms:
    """One backward: while a call runs, the later one is reduced and the earlier one gathered."""
    parts: list[tuple[float, Terms]] = []
    overlap = made.problem.cluster.overlap
    for (later, kind, earlier), count in made.problem.boundary.backward_steps.items():
        main, shared = made.backward[kind.block]
        reduced = reduce(made.states[later]) if later is not None else {}
        gathered = made.states[earlier].gather_backward if earlier is not None else {}
        hidden = total((float(overlap.reductions_behind), reduced), (float(overlap.gathers_behind), gathered))
        exposed = total((float(not overlap.reductions_behind), reduced), (float(not overlap.gathers_behind), gathered))
        parts.append((float(count), exposed))
        # what calls share is complete when the first call's backward ends
        shared_too = earlier is None and None in made.states
        summed = total((1.0, made.states[kind].accumulate), (1.0, made.states[None].accumulate if shared_too else {}))
        busy = total((1.0, {main: 1.0}), (1.0, summed))
        parts.append((float(count), _step(made, busy, hidden, shared)))
    return total(*parts)


def _step(made: Formulation, main: Terms, hidden: Terms, shared: Terms) -> Terms:
    """The seconds of one call."""
    if not any(hidden.values()):
        return main
    t = made.model.variable()
    # t >= compute + exposed, slowed by the transfers behind it
    made.model.at_least(t, total((1.0, main), (made.problem.cluster.overlap.contention, hidden)))
    # t >= transfers behind it + what is exposed on the same physical link
    made.model.at_least(t, total((1.0, hidden), (1.0, shared)))
    return {t: 1.0}
