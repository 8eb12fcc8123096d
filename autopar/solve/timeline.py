"""Time in the ILP: what a block call takes, and the sum over the step with transfers behind the calls."""

from __future__ import annotations

from autopar.solve.formulation import Formulation
from autopar.solve.linear import Terms, add, total
from autopar.solve.problem import BlockTable, Seconds


def block_seconds(made: Formulation, name: str, table: BlockTable) -> None:
    """main = sum_s x (compute + inner collectives) + sum_step y (conversion), and the part of it on the data axis' links."""
    spent: list[dict[int, float]] = [{}, {}, {}, {}]
    again = float(name in made.problem.recompute)

    def spend(variable: int, seconds: Seconds) -> None:
        backward = seconds.backward + again * seconds.forward
        backward_shared = seconds.backward_shared + again * seconds.forward_shared
        each = (seconds.forward, backward, seconds.forward_shared, backward_shared)
        for terms, value in zip(spent, each, strict=True):
            if value:
                add(terms, {variable: value / made.second_unit})

    for node, choices in table.choices.items():
        for choice, x in zip(choices, made.x[name, node], strict=True):
            spend(x, choice.seconds)
    for value, moves in table.moves.items():
        for step, y in zip(moves.steps, made.y[name, value], strict=True):
            spend(y, step.seconds)
    forward, backward, forward_shared, backward_shared = spent
    many = made.problem.mesh.sizes[0] > 1
    made.forward[name] = made.model.define(forward), {made.model.define(forward_shared): 1.0} if many and forward_shared else {}
    made.backward[name] = (
        made.model.define(backward),
        {made.model.define(backward_shared): 1.0} if many and backward_shared else {},
    )


def timeline(made: Formulation) -> None:
    """step = first gather + forward + backward + last reduction + optimizer (the contract's timing model)."""
    model, boundary, states = made.model, made.problem.boundary, made.states
    root = states.get(None)
    model.minimise(states[boundary.kinds[0]].gather_forward)
    model.minimise(states[boundary.kinds[0]].reduce)
    if root is not None:
        model.minimise(root.gather_forward)
        model.minimise(root.reduce)
    for (kind, after), count in boundary.forward_steps.items():
        main, shared = made.forward[kind.block]
        hidden = dict(states[after].gather_forward) if after is not None else {}
        _step(made, main, total((1.0, hidden), (1.0, shared)) if hidden else {}, count)
    for (later, kind, earlier), count in boundary.backward_steps.items():
        main, shared = made.backward[kind.block]
        hidden = total(
            (1.0, states[later].reduce if later is not None else {}),
            (1.0, states[earlier].gather_backward if earlier is not None else {}),
        )
        _step(made, main, total((1.0, hidden), (1.0, shared)) if hidden else {}, count)
    for key, state in states.items():
        streaming, launching = state.optimizer
        if streaming:
            # optimizer >= streaming of the local shard, optimizer >= launches
            spent = model.variable()
            model.at_least(spent, streaming)
            if any(launching.values()):
                model.at_least(spent, launching)
            model.minimise({spent: float(boundary.kind_counts[key] if key is not None else 1)})


def _step(made: Formulation, main: int, hidden: Terms, count: int) -> None:
    """Adds ``count * t``."""
    if not any(hidden.values()):
        made.model.minimise({main: float(count)})
        return
    t = made.model.variable()
    # t >= compute + exposed
    made.model.at_least(t, {main: 1.0})
    # t >= transfers behind it + what is exposed on the same physical link
    made.model.at_least(t, hidden)
    made.model.minimise({t: float(count)})
