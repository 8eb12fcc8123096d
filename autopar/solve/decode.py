"""From a solution of the ILP back to a plan: strategies, boundary placements, and per value a tree of conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.replay import Replay, again_without
from autopar.cost_models.storages import aliases
from autopar.ir.placement import Placements, Replicate
from autopar.ir.plan import Arc, BlockPlan, Candidate, NodePlan
from autopar.solve.boundary import Slot
from autopar.solve.formulation import Formulation
from autopar.solve.problem import BlockTable
from autopar.solve.replay import Storages, replayable


def decode(made: Formulation, values: Sequence[float]) -> Candidate:
    """The candidate that the variables describe."""
    problem = made.problem
    placements = {number: allowed[_chosen(values, made.w[number])] for number, allowed in problem.placements.items()}
    blocks = tuple(_block(made, values, placements, table) for table in problem.blocks.values())
    batch = problem.batch * problem.micro_batches
    return Candidate(problem.mesh, blocks, batch, problem.precision, problem.micro_batches, problem.zero_group)


def _chosen(values: Sequence[float], variables: Sequence[int]) -> int:
    return max(range(len(variables)), key=lambda index: values[variables[index]])


def _block(made: Formulation, values: Sequence[float], placements: dict[int, Placements], table: BlockTable) -> BlockPlan:
    block, classes = table.block, made.problem.boundary.classes

    def at(side: str, count: int) -> tuple[Placements, ...]:
        return tuple(placements[classes[Slot(block.name, side, index)]] for index in range(count))  # type: ignore[arg-type]

    inputs, parameters, outputs = at("in", len(block.inputs)), at("param", len(block.parameters)), at("out", len(block.outputs))
    plans: dict[str, NodePlan] = {
        node: choices[_chosen(values, made.x[block.name, node])].plan for node, choices in table.choices.items()
    }
    produced = {value.name: where for value, where in zip(block.inputs, inputs, strict=True)}
    produced |= {p.value.name: where for p, where in zip(block.parameters, parameters, strict=True)}
    for node in block.nodes:
        produced |= {value.name: where for value, where in zip(node.outputs, plans[node.name].results, strict=True)}
    replicated = (Replicate(),) * len(made.problem.mesh.sizes)
    arcs: list[Arc] = []
    for value, consumers in table.consumers.items():
        needs = [
            replicated if name == "=" else outputs[index] if name == "" else plans[name].operands[index]
            for name, index in consumers
        ]
        arcs += _tree(made, values, table, value, produced[value], needs)
    zero = max(made.z[block.name], key=lambda stage: values[made.z[block.name][stage]])
    plan = BlockPlan(
        block.name, inputs, parameters, outputs, tuple(plans[node.name] for node in block.nodes), tuple(arcs), zero
    )
    storages = made.storages.get(block.name)
    return _replayed(table, plan, values, storages) if storages is not None and storages.again else plan


def _replayed(table: BlockTable, plan: BlockPlan, values: Sequence[float], of: Storages) -> BlockPlan:
    """What must run again, and no more, where the tensors of the solution are kept."""
    hosted = {state for state, variable in of.hosted.items() if values[variable] > 0.5}
    kept = hosted | {state for state, variable in of.kept.items() if values[variable] > 0.5}
    plan = again_without(table.costs, plan, lambda state: of.same.find(state) in kept, replayable(table.block))
    replay = Replay.of(table.costs, plan, aliases(table.block, plan.nodes, plan.arcs))
    return replace(plan, offload=tuple(state for state in replay.kept if of.same.find(state) in hosted))


def _tree(
    made: Formulation, values: Sequence[float], table: BlockTable, value: str, source: Placements, needs: Sequence[Placements]
) -> list[Arc]:
    """The paid steps that lead from `source` to the needs, parents first."""
    moves, y = table.moves[value], made.y[table.block.name, value]
    after: dict[int, list[int]] = {}
    for step, paid in zip(moves.steps, y, strict=True):
        if values[paid] > 0.5:
            after.setdefault(step.source, []).append(step.target)
    start = moves.states.index(source)
    parents: dict[int, int] = {start: start}
    order = [start]
    for here in order:
        for target in after.get(here, ()):
            if target not in parents:
                parents[target] = here
                order.append(target)
    used = {start}
    for need in needs:
        state = moves.states.index(need)
        assert state in parents, f"{table.block.name}.{value}: no way from {source} to {need}"
        while state not in used:
            used.add(state)
            state = parents[state]
    return [Arc(value, moves.states[parents[s]], moves.states[s]) for s in order if s in used and s != start]
