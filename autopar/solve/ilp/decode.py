"""The way from a solution of the ILP back to a plan: strategies, boundary placements, conversion trees, and what is recomputed,
offloaded and partitioned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import networkx

from autopar.cost_models.step.block_memory import extra_storage
from autopar.cost_models.step.evaluate import Evaluation
from autopar.cost_models.step.recompute import RecomputePlan, with_least_recompute
from autopar.cost_models.tensors.sizes import PlacedValue
from autopar.ir.placement import Placements, Replicate
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan
from autopar.solve.ilp.formulation import Formulation
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import BlockTable


def decode(form: Formulation, values: Sequence[float]) -> Candidate:
    """The candidate that the values of the model's columns describe."""
    problem = form.problem
    placements = {number: allowed[_chosen(values, form.w[number])] for number, allowed in problem.placements.items()}
    return Candidate(
        mesh=problem.mesh,
        blocks=tuple(_block_plan(form, values, placements, table) for table in problem.blocks.values()),
        batch=problem.graph.batch * problem.micro_batches,
        precision=problem.precision,
        micro_batches=problem.micro_batches,
        zero_group=problem.zero_group,
    )


def _chosen(values: Sequence[float], columns: Sequence[int]) -> int:
    """The index of the one-hot column that is set."""
    return max(range(len(columns)), key=lambda index: values[columns[index]])


def _block_plan(form: Formulation, values: Sequence[float], placements: dict[int, Placements], table: BlockTable) -> BlockPlan:
    block, classes = table.block, form.problem.boundary.classes

    def at(side: str, count: int) -> tuple[Placements, ...]:
        return tuple(placements[classes[Slot(block.name, side, index)]] for index in range(count))  # type: ignore[arg-type]

    inputs, parameters, outputs = at("in", len(block.inputs)), at("param", len(block.parameters)), at("out", len(block.outputs))
    plans: dict[str, NodePlan] = {
        node: strategies[_chosen(values, form.x[block.name, node])].plan for node, strategies in table.strategies.items()
    }
    produced = {value.name: where for value, where in zip(block.inputs, inputs, strict=True)}
    produced |= {p.value.name: where for p, where in zip(block.parameters, parameters, strict=True)}
    for node in block.nodes:
        produced |= {value.name: where for value, where in zip(node.outputs, plans[node.name].results, strict=True)}
    replicated = (Replicate(),) * len(form.problem.mesh.sizes)
    conversions: list[Conversion] = []
    for value, consumers in table.consumers.items():
        needs = [
            replicated if name == "=" else outputs[index] if name == "" else plans[name].operands[index]
            for name, index in consumers
        ]
        conversions += _conversion_tree(form, values, table, value, produced[value], needs)
    plan = BlockPlan(
        block=block.name,
        inputs=inputs,
        parameters=parameters,
        outputs=outputs,
        nodes=tuple(plans[node.name] for node in block.nodes),
        conversions=tuple(conversions),
        zero=max(form.z[block.name], key=lambda zero: values[form.z[block.name][zero]]),
    )
    decided = block.name in form.storages and form.storages[block.name].seconds
    return _with_recompute(form, table, plan, values) if decided else plan


def _with_recompute(form: Formulation, table: BlockTable, plan: BlockPlan, values: Sequence[float]) -> BlockPlan:
    """The plan with the least recomputation where the storages of the solution are saved, in parts too, or offloaded."""
    storages, axes = form.storages[plan.block], form.problem.mesh.names
    offloaded = {storage for storage, column in storages.offloaded.items() if values[column] > 0.5}
    parts = {storage: axes[axis] for (storage, axis), column in storages.partitioned.items() if values[column] > 0.5}
    saved = offloaded | parts.keys() | {storage for storage, column in storages.saved.items() if values[column] > 0.5}
    extras = {
        (each.value, each.placements): extra_storage(each)
        for node in plan.nodes
        for each in table.costs.saved_tensors(node)
        if each.value.endswith("+")
    }

    def find(value: PlacedValue) -> PlacedValue:
        return extras.get(value) or storages.same.find(value)

    plan = with_least_recompute(table.costs, plan, lambda value: find(value) in saved)
    recompute = RecomputePlan.of(table.costs, plan)
    return replace(
        plan,
        offload=tuple(value for value in recompute.saved if find(value) in offloaded),
        partition_saved=tuple((*value, parts[find(value)]) for value in recompute.saved if find(value) in parts),
    )


def _conversion_tree(
    form: Formulation, values: Sequence[float], table: BlockTable, value: str, source: Placements, needs: Sequence[Placements]
) -> list[Conversion]:
    """The paid conversions that lead from `source` to the needs, breadth first: parents before what is converted from them."""
    conversions, y = table.conversions[value], form.y[table.block.name, value]
    start = conversions.states.index(source)
    graph = networkx.DiGraph()
    graph.add_node(start)
    graph.add_edges_from(
        (edge.source, edge.target) for edge, paid in zip(conversions.edges, y, strict=True) if values[paid] > 0.5
    )
    parents = {state: parent for parent, state in networkx.bfs_edges(graph, start)}
    used = {start}
    for need in needs:
        state = conversions.states.index(need)
        assert state in parents or state == start, f"{table.block.name}.{value}: no path from {source} to {need}"
        while state not in used:
            used.add(state)
            state = parents[state]
    states = conversions.states
    return [Conversion(value, states[parent], states[state]) for state, parent in parents.items() if state in used]


def trim_offload(
    candidate: Candidate, evaluation: Evaluation, price: Callable[[Candidate], Evaluation]
) -> tuple[Candidate, Evaluation]:
    """The plan without needless offloading and partition, to which the solver is indifferent where copies overlap the
    computation: one tensor after another is saved whole on the device, where the plan still fits and takes no longer."""
    for number, plan in enumerate(candidate.blocks):
        for value in (*plan.offload, *plan.partition_saved):
            blocks = list(candidate.blocks)
            blocks[number] = _without(blocks[number], value)
            other = replace(candidate, blocks=tuple(blocks))
            priced = price(other)
            if priced.fits and priced.step_seconds <= evaluation.step_seconds:
                candidate, evaluation = other, priced
    return candidate, evaluation


def _without(plan: BlockPlan, value: object) -> BlockPlan:
    return replace(
        plan,
        offload=tuple(each for each in plan.offload if each != value),
        partition_saved=tuple(each for each in plan.partition_saved if each != value),
    )
