"""The ILP of one problem: strategies, placement flows, boundaries, state sharding, time and (where asked for) memory.

Blocks appear once, with counts: nothing grows with depth. Every constraint carries its formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.placement import Placements, Replicate
from autopar.solve.boundary import Slot
from autopar.solve.formulation import Formulation
from autopar.solve.linear import INFINITY, add, total
from autopar.solve.problem import BlockTable, Problem
from autopar.solve.replay import storages
from autopar.solve.state import Stored, group_terms, split_by_zero
from autopar.solve.timeline import block_seconds, timeline

REDUNDANT_SHARE = 0.0199
"""A forced axis repeats at most this share of FLOPs, where that is possible at all."""

_PENALTY = 300.0
"""Steps that a wholly repeated axis costs, where it is forced."""


def formulate(problem: Problem, sharded_axes: Sequence[int] = (), replay: bool = False) -> Formulation:
    """Without the memory constraint, which `memory.limit` adds. `sharded_axes` must not repeat FLOPs. With `replay` every tensor
    is kept, made again in the backward, or moved to the host; else all that the backward needs is kept."""
    made = flows(problem)
    if replay:
        for name, table in problem.blocks.items():
            _trees(made, table)
            made.storages[name] = storages(made, name, table, decide=True)
    _zero_stages(made)
    _states(made)
    for name, table in problem.blocks.items():
        block_seconds(made, name, table)
    timeline(made)
    for axis in sharded_axes:
        _sharded(made, axis)
    return made


def flows(problem: Problem) -> Formulation:
    """Strategies, boundaries and the placement flows between them, without time, state and objective."""
    made = Formulation(problem, _second_unit(problem), problem.cluster.device.memory_bytes / 100)
    _boundaries(made)
    for table in problem.blocks.values():
        _strategies(made, table)
        for value in table.consumers:
            _flow(made, table, value)
    return made


def _second_unit(problem: Problem) -> float:
    """Scales the time of a micro-batch to about a thousand."""
    least = sum(
        problem.graph.count(name) * min((c.seconds.forward + c.seconds.backward for c in choices), default=0.0)
        for name, table in problem.blocks.items()
        for choices in table.choices.values()
    )
    return max(least, 1e-9) / 1000


def _boundaries(made: Formulation) -> None:
    for number, allowed in made.problem.placements.items():
        made.w[number] = [made.model.binary() for _ in allowed]
        # sum_p w[class, p] = 1
        made.model.row([(w, 1.0) for w in made.w[number]], 1.0, 1.0)


def _strategies(made: Formulation, table: BlockTable) -> None:
    for node, choices in table.choices.items():
        made.x[table.block.name, node] = [made.model.binary() for _ in choices]
        # sum_s x[node, s] = 1
        made.model.row([(x, 1.0) for x in made.x[table.block.name, node]], 1.0, 1.0)


def _class_terms(made: Formulation, slot: Slot) -> dict[Placements, dict[int, float]]:
    number = made.problem.boundary.classes[slot]
    return {at: {w: 1.0} for at, w in zip(made.problem.placements[number], made.w[number], strict=True)}


def _produced(made: Formulation, table: BlockTable, value: str) -> dict[Placements, dict[int, float]]:
    """Per placement the expression that says whether the value is produced there."""
    block = table.block
    for index, each in enumerate(block.inputs):
        if each.name == value:
            return _class_terms(made, Slot(block.name, "in", index))
    for index, parameter in enumerate(block.parameters):
        if parameter.value.name == value:
            return _class_terms(made, Slot(block.name, "param", index))
    node = next(node for node in block.nodes if any(output.name == value for output in node.outputs))
    index = [output.name for output in node.outputs].index(value)
    out: dict[Placements, dict[int, float]] = {}
    for choice, x in zip(table.choices[node.name], made.x[block.name, node.name], strict=True):
        out.setdefault(choice.plan.results[index], {})[x] = 1.0
    return out


def _needed(made: Formulation, table: BlockTable, consumer: tuple[str, int]) -> dict[Placements, dict[int, float]]:
    name, index = consumer
    if name == "=":
        return {}
    if name == "":
        return _class_terms(made, Slot(table.block.name, "out", index))
    out: dict[Placements, dict[int, float]] = {}
    for choice, x in zip(table.choices[name], made.x[table.block.name, name], strict=True):
        out.setdefault(choice.plan.operands[index], {})[x] = 1.0
    return out


def _flow(made: Formulation, table: BlockTable, value: str) -> None:
    """One unit per consumer from the produced to the needed placement; a step is paid once however many use it."""
    model, moves, consumers = made.model, table.moves[value], table.consumers[value]
    produced = _produced(made, table, value)
    y = [model.binary() for _ in moves.steps]
    made.y[table.block.name, value] = y
    replicated = (Replicate(),) * len(made.problem.mesh.sizes)
    for consumer in consumers:
        flow = y if len(consumers) == 1 else [model.variable(1.0) for _ in moves.steps]
        rows: list[dict[int, float]] = [{} for _ in moves.states]
        needed = _needed(made, table, consumer)
        for row, state in zip(rows, moves.states, strict=True):
            add(row, produced.get(state, {}))
            add(row, needed.get(state, {}), -1.0)
        for step, f in zip(moves.steps, flow, strict=True):
            add(rows[step.source], {f: -1.0})
            add(rows[step.target], {f: 1.0})
        for row, state in zip(rows, moves.states, strict=True):
            # produced[p] + sum_into_p f = needed[p] + sum_out_of_p f, for each consumer
            if row:
                constant = float(consumer[0] == "=" and state == replicated)
                model.row(row, constant, constant)
        if flow is not y:
            for f, paid in zip(flow, y, strict=True):
                # y[step] >= f[consumer, step]
                model.row([(paid, 1.0), (f, -1.0)], 0.0, INFINITY)


def _trees(made: Formulation, table: BlockTable) -> None:
    """The conversions of a value are a tree. There is no way back to a placement that it has: no plan can say so."""
    for value, moves in table.moves.items():
        into: list[dict[int, float]] = [{} for _ in moves.states]
        for step, y in zip(moves.steps, made.y[table.block.name, value], strict=True):
            into[step.target][y] = 1.0
        produced = _produced(made, table, value)
        for state, paid in zip(moves.states, into, strict=True):
            terms = total((1.0, paid), (1.0, produced.get(state, {})))
            if paid and len(terms) > 1:
                # produced[p] + sum_into_p y <= 1
                made.model.row(terms, -INFINITY, 1.0)


def _zero_stages(made: Formulation) -> None:
    """One state sharding per block; shared parameters take the largest of their users', at most 2."""
    problem, model = made.problem, made.model
    boundary = problem.boundary
    users = sorted({kind.block for kind in boundary.kind_counts if not all(kind.own)})
    groups = [(name, problem.zeros) for name in problem.blocks]
    groups += [("", tuple(sorted({min(2, zero) for zero in problem.zeros})))] if users else []
    for name, stages in groups:
        if name and not any(not parameter.buffer for parameter in problem.blocks[name].block.parameters):
            stages = stages[:1]
        made.z[name] = {zero: model.binary() for zero in stages}
        # sum_zero z[block, zero] = 1
        model.row([(z, 1.0) for z in made.z[name].values()], 1.0, 1.0)
        model.decisive.append(tuple(made.z[name].values()))
    for level in (1, 2) if users else ():

        def above(name: str, level: int = level) -> dict[int, float]:
            return {z: 1.0 for zero, z in made.z[name].items() if zero >= level}

        for name in users:
            # Z[shared] >= level where Z[block] >= level
            model.row(total((1.0, above("")), (-1.0, above(name))), 0.0, INFINITY)
        # and only where some user's is
        model.row(total((-1.0, above("")), *((1.0, above(name)) for name in users)), 0.0, INFINITY)


def _states(made: Formulation) -> None:
    problem, boundary = made.problem, made.problem.boundary
    sizes, units = problem.mesh.sizes, (made.second_unit, made.byte_unit)

    def stored(slot: Slot) -> Stored:
        number = boundary.classes[slot]
        return Stored(boundary.parameter(slot), problem.placements[number], made.w[number])

    for name, table in problem.blocks.items():
        slots = [stored(Slot(name, "param", index)) for index in range(len(table.block.parameters))]
        split = [split_by_zero(made.model, each, made.z[name], sizes) for each in slots]
        for kind in boundary.kind_counts:
            if kind.block == name:
                own = [index for index, alone in enumerate(kind.own) if alone]
                made.states[kind] = group_terms(
                    made.model, [slots[i] for i in own], [split[i] for i in own], made.z[name], table.costs,
                    problem.precision, problem.optimizer, units, problem.micro_batches,
                )  # fmt: skip
    if boundary.shared:
        slots = [stored(slot) for slot in boundary.shared.values()]
        split = [split_by_zero(made.model, each, made.z[""], sizes) for each in slots]
        costs = next(iter(problem.blocks.values())).costs
        made.states[None] = group_terms(
            made.model, slots, split, made.z[""], costs, problem.precision, problem.optimizer, units, problem.micro_batches
        )


def _sharded(made: Formulation, axis: int) -> None:
    """The share of FLOPs that an axis repeats stays small; where that cannot be, as small as can be."""
    problem = made.problem
    flops = sum(problem.graph.count(name) * table.flops for name, table in problem.blocks.items())
    if not flops:
        return
    slack = made.model.variable(1.0)
    made.penalties[slack] = 1000.0 * _PENALTY * problem.micro_batches
    made.model.minimise({slack: made.penalties[slack]})
    terms = {
        x: problem.graph.count(name) * choice.redundant_flops[axis] / flops
        for name, table in problem.blocks.items()
        for node, choices in table.choices.items()
        for choice, x in zip(choices, made.x[name, node], strict=True)
        if choice.redundant_flops[axis]
    }
    # sum_s x * flops / all flops <= share + slack
    made.model.row(total((1.0, terms), (-1.0, {slack: 1.0})), -INFINITY, REDUNDANT_SHARE)
