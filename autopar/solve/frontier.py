"""Plans of every block that take less and less memory, on one sharding: what the stages of a pipeline choose from.

The sharding is solved once, without memory; a parameter that lies on more ranks than it must costs something, since state is what
fills a stage. With placements pinned, what is kept and what runs again is solved at a few prices of memory, by a small ILP for
all blocks together. Plans of different prices can follow each other, since nothing between blocks differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate
from autopar.solve import ilp
from autopar.solve.boundary import Slot
from autopar.solve.decode import decode
from autopar.solve.formulate import flows
from autopar.solve.formulation import Formulation
from autopar.solve.linear import add, total
from autopar.solve.problem import BlockTable, Choice, Moves, Problem
from autopar.solve.replay import storages

PRICES = (0.03, 0.1, 0.3, 1.0)
"""Of memory: so many times the forward's seconds for all that a block would keep."""

_HELD = 0.3
"""What all parameters cost, cut as small as they can be, as a share of the work."""

Options = tuple[Mapping[str, BlockPlan], ...]
"""Block plans by name: the first keeps all that the backward needs, the last one the inputs of blocks alone."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """A sharding of all blocks on one stage mesh for one size of micro-batch, and its options."""

    problem: Problem
    sharding: Candidate
    options: Options


def frontier(problem: Problem, time_limit_seconds: float) -> Frontier | None:
    """None where time ends, or the blocks cannot be placed (pins)."""
    sharding = _sharding(problem, time_limit_seconds)
    if sharding is None:
        return None
    pinned = _pinned(problem, sharding)
    keeping = {plan.block: plan for plan in sharding.blocks}
    options = [keeping]
    for price in PRICES:
        found = _priced(pinned, price)
        if found is not None and found not in options:
            options.append(found)
    whole = {
        name: replace(plan, recompute=True) if problem.graph.count(name) > 1 else options[-1][name]
        for name, plan in keeping.items()
    }
    if whole not in options:
        options.append(whole)
    return Frontier(problem, sharding, tuple(options))


def _sharding(problem: Problem, time_limit_seconds: float) -> Candidate | None:
    made = flows(problem)
    for name in problem.blocks:
        made.z[name] = {0: made.model.variable(1.0, lower=1.0)}
    made.model.minimise(_work(made))
    made.model.minimise(_holding(made))
    outcome = ilp.solve_large(made.model, time_limit_seconds=time_limit_seconds, relative_gap=1e-3)
    return decode(made, outcome.values) if outcome.values else None


def _work(made: Formulation) -> dict[int, float]:
    """Seconds of all calls, forward and backward, in the model's unit."""
    out: dict[int, float] = {}
    for name, table in made.problem.blocks.items():
        count = made.problem.graph.count(name) / made.second_unit
        for node, choices in table.choices.items():
            for choice, x in zip(choices, made.x[name, node], strict=True):
                add(out, {x: count * (choice.seconds.forward + choice.seconds.backward)})
        for value, moves in table.moves.items():
            for step, y in zip(moves.steps, made.y[name, value], strict=True):
                add(out, {y: count * (step.seconds.forward + step.seconds.backward)})
    return out


def _holding(made: Formulation) -> dict[int, float]:
    """``_HELD x work x parameters on one device / the least of that``; the work is about 1000 units."""
    problem, boundary = made.problem, made.problem.boundary
    out: dict[int, float] = {}
    least = 0.0
    for name, table in problem.blocks.items():
        count = problem.graph.count(name)
        for index, parameter in enumerate(table.block.parameters):
            if parameter.buffer:
                continue
            number = boundary.classes[Slot(name, "param", index)]
            sizes = [table.costs.value_bytes(parameter.value.name, at) for at in problem.placements[number]]
            least += count * min(sizes)
            add(out, {w: count * size for w, size in zip(made.w[number], sizes, strict=True)})
    return {w: _HELD * 1000.0 * size / least for w, size in out.items()} if least else {}


def _pinned(problem: Problem, sharding: Candidate) -> Problem:
    """The tables with nothing left to choose but what is kept."""
    boundary = problem.boundary
    placements: dict[int, tuple[Placements, ...]] = {}
    for slot, number in boundary.classes.items():
        plan = sharding.block(slot.block)
        of = {"in": plan.inputs, "out": plan.outputs, "param": plan.parameters}[slot.side]
        placements[number] = (of[slot.index],)
    blocks = {name: _pinned_table(table, sharding.block(name)) for name, table in problem.blocks.items()}
    return replace(problem, placements=placements, blocks=blocks, zeros=(0,))


def _pinned_table(table: BlockTable, plan: BlockPlan) -> BlockTable:
    chosen = {each.node: each for each in plan.nodes}
    choices: dict[str, tuple[Choice, ...]] = {
        node: tuple(choice for choice in every if choice.plan == chosen[node])[:1] for node, every in table.choices.items()
    }
    moves = {}
    for value in table.consumers:
        every = table.moves[value]
        taken = {(arc.source, arc.target) for arc in plan.arcs if arc.value == value}
        steps = tuple(step for step in every.steps if (every.states[step.source], every.states[step.target]) in taken)
        moves[value] = Moves(every.states, steps)
    return replace(table, choices=choices, moves=moves)


def _priced(pinned: Problem, price: float) -> dict[str, BlockPlan] | None:
    """At ``price x forward seconds of the block / bytes that it would keep`` for each byte."""
    made = flows(pinned)
    for name, table in pinned.blocks.items():
        made.z[name] = {0: made.model.variable(1.0, lower=1.0)}
        of = made.storages[name] = storages(made, name, table, decide=True)
        for hosted in of.hosted.values():
            made.model.upper[hosted] = 0.0
        forward = sum(choices[0].seconds.forward for choices in table.choices.values()) / made.second_unit
        needed = sum(of.sizes[state] for state in of.needs)
        if not needed or not forward:
            continue
        again = total(*((seconds.forward / made.second_unit, {variable: 1.0}) for seconds, variable in of.again))
        kept = {s: of.sizes[state] * price * forward / needed for state, s in of.kept.items() if of.sizes.get(state)}
        made.model.minimise(again)
        made.model.minimise(kept)
    outcome = ilp.solve(made.model, time_limit_seconds=2.0, relative_gap=1e-3)
    if not outcome.values:
        return None
    return {plan.block: plan for plan in decode(made, outcome.values).blocks}
