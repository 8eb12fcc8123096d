"""Plans of every block that take less and less memory under one sharding: what the pipeline stages choose from.

The sharding is solved once, without memory; parameters that are sharded less than possible cost something, since state is what
fills a pipeline stage. With placements fixed, what is saved and what is recomputed is chosen by a small ILP for all blocks
together, at the prices of a byte between which the frontier of seconds and bytes has its corners. Plans of different prices can
follow each other, since placements between blocks are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.step.call_trace import costs_as_run
from autopar.cost_models.step.recompute import with_saved_only
from autopar.ir.placement import Placements, Replicate
from autopar.ir.plan import BlockPlan, Candidate
from autopar.rules.loss_chunks import as_plain
from autopar.solve.bounds.frontier import ROUNDING, Frontier
from autopar.solve.fixed.recomputation import with_all_recomputed
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import add_redundancy_limits, formulate_flows
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import add
from autopar.solve.ilp.recompute_offload import add_storages
from autopar.solve.ilp.solver import solve_large
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import BlockTable, NodeStrategy, PricedConversions, Problem

_HALVINGS = 3
"""The number of times that an edge of the frontier of seconds and saved bytes is halved."""

_MIN_GAIN = 1e-2
"""A corner that lowers an edge of the frontier by less, relative, is the last one there."""

_PARAMETER_COST = 0.3
"""Cost of all parameters, sharded as much as possible, as a share of the seconds of the calls."""

BlockOptions = tuple[Mapping[str, BlockPlan], ...]
"""Block plans by name: the first saves all that the backward needs, the last one only the inputs of blocks."""


@dataclass(frozen=True, slots=True)
class MemoryFrontier:
    """A sharding of all blocks on the mesh of one pipeline stage for one micro-batch size, and its options."""

    problem: Problem
    sharding: Candidate
    options: BlockOptions


def memory_frontier(problem: Problem, time_limit_seconds: float, sharded_axes: Sequence[int] = ()) -> MemoryFrontier | None:
    """Return the frontier of a problem; None where time ends, or the pins leave no placement. `sharded_axes` are forced, as in
    `formulate`."""
    frontier = fastest_sharding(problem, time_limit_seconds, sharded_axes)
    return None if frontier is None else with_less_memory(frontier)


def fastest_sharding(problem: Problem, time_limit_seconds: float, sharded_axes: Sequence[int] = ()) -> MemoryFrontier | None:
    """Return the frontier with its first option only, a small part of the work of `memory_frontier`."""
    sharding = _sharding(problem, time_limit_seconds, sharded_axes)
    return None if sharding is None else MemoryFrontier(problem, sharding, ({plan.block: plan for plan in sharding.blocks},))


def with_less_memory(fastest: MemoryFrontier) -> MemoryFrontier:
    """Return the frontier with all options, from `fastest_sharding`."""
    problem, sharding, (saving_all,) = fastest.problem, fastest.sharding, fastest.options
    fixed = with_fixed_placements(problem, sharding)
    options = [saving_all]
    for plans in _plans_by_bytes(fixed):
        if plans not in options:
            options.append(plans)
    repeated = {name for name in saving_all if problem.graph.count(name) > 1}
    others = {name: plan for name, plan in options[-1].items() if name not in repeated}
    blocks = {name: problem.blocks[name].block for name in repeated}
    recomputing_all = {**{name: with_all_recomputed(blocks[name], saving_all[name]) for name in repeated}, **others}
    if recomputing_all not in options:
        options.append(recomputing_all)
    return replace(fastest, options=tuple(_under_any_schedule(problem, each) for each in options))


def _under_any_schedule(problem: Problem, plans: Mapping[str, BlockPlan]) -> Mapping[str, BlockPlan]:
    """Return plans that can also run where a schedule splits the backward: blocks are not compiled there, and save others."""
    out = {}
    for name, plan in plans.items():
        costs = problem.blocks[name].costs
        run = costs_as_run(costs, plan, split_backward=True)
        out[name] = plan if run is costs or not (plan.offload or plan.partition_saved) else with_saved_only(run, plan)
    return out


def _sharding(problem: Problem, time_limit_seconds: float, sharded_axes: Sequence[int]) -> Candidate | None:
    form = formulate_flows(problem)
    for name in problem.blocks:
        form.z[name] = {0: form.model.variable(1.0, lower=1.0)}
    form.model.minimise(_call_seconds(form))
    form.model.minimise(_parameter_cost(form))
    add_redundancy_limits(form, sharded_axes)
    outcome = solve_large(form.model, time_limit_seconds=time_limit_seconds, relative_gap=1e-3)
    return decode(form, outcome.values) if outcome.values else None


def _call_seconds(form: Formulation) -> dict[int, float]:
    """Seconds of all calls, forward and backward, in the model's unit, as if gradients of weights hid no collective: they hide
    all-reduces best, which leave activations whole, and those fill a stage. Schedules that split the backward hide none."""
    out: dict[int, float] = {}
    for name in form.problem.blocks:
        count = form.problem.graph.count(name) / form.second_unit
        for column, seconds, _ in form.placed_columns(name):
            add(out, {column: count * (seconds.forward + seconds.backward)})
    return out


def _parameter_cost(form: Formulation) -> dict[int, float]:
    """Return ``_PARAMETER_COST x seconds of the calls x parameters on one device / the least of these``; the seconds are about
    1000 units."""
    problem, boundary = form.problem, form.problem.boundary
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
            add(out, {w: count * size for w, size in zip(form.w[number], sizes, strict=True)})
    return {w: _PARAMETER_COST * 1000.0 * size / least for w, size in out.items()} if least else {}


def with_fixed_placements(problem: Problem, sharding: Candidate) -> Problem:
    """The tables with nothing left to choose but what is saved and recomputed."""
    boundary = problem.boundary
    placements: dict[int, tuple[Placements, ...]] = {}
    for slot, number in boundary.classes.items():
        plan = sharding.block(slot.block)
        of = {"in": plan.inputs, "out": plan.outputs, "param": plan.parameters}[slot.side]
        placements[number] = (of[slot.index],)
    blocks = {name: _fixed_table(table, sharding.block(name)) for name, table in problem.blocks.items()}
    return replace(problem, placements=placements, blocks=blocks, zeros=(0,))


def _fixed_table(table: BlockTable, plan: BlockPlan) -> BlockTable:
    chosen = {each.node: each for each in plan.nodes}
    strategies: dict[str, tuple[NodeStrategy, ...]] = {
        node: tuple({each.plan.function: each for each in every if as_plain(each.plan) == as_plain(chosen[node])}.values())
        for node, every in table.strategies.items()
    }
    placed = _placements_of_values(table, plan)
    conversions = {}
    for value in table.consumers:
        every = table.conversions[value]
        pairs = {(each.source, each.target) for each in plan.conversions if each.value == value}
        states = tuple(state for state in every.states if state in placed[value])
        number = {state: index for index, state in enumerate(states)}
        edges = (edge for edge in every.edges if (every.states[edge.source], every.states[edge.target]) in pairs)
        renumbered = (replace(e, source=number[every.states[e.source]], target=number[every.states[e.target]]) for e in edges)
        conversions[value] = PricedConversions(states, tuple(renumbered))
    return replace(table, strategies=strategies, conversions=conversions)


def _placements_of_values(table: BlockTable, plan: BlockPlan) -> dict[str, set[Placements]]:
    """Return all placements that each value of a block has in a plan."""
    block, nodes = table.block, table.costs.nodes
    ends = [*zip([each.name for each in block.inputs], plan.inputs, strict=True), *zip(block.outputs, plan.outputs, strict=True)]
    ends += zip([each.value.name for each in block.parameters], plan.parameters, strict=True)
    for each in plan.nodes:
        node = nodes[each.node]
        ends += zip(node.operands(), each.operands, strict=True)
        ends += zip([value.name for value in node.outputs], each.results, strict=True)
    ends += [(name, (Replicate(),) * len(table.costs.mesh.sizes)) for _, name in block.updates]
    out: dict[str, set[Placements]] = {}
    for name, at in [*ends, *((each.value, at) for each in plan.conversions for at in (each.source, each.target))]:
        out.setdefault(name, set()).add(at)
    return out


def _plans_by_bytes(fixed: Problem) -> list[dict[str, BlockPlan]]:
    """Return the plans at the corners of the frontier of all calls' seconds and saved bytes where placements are fixed, those
    that save most first. They choose what is saved, recomputed and saved in parts; nothing is offloaded."""
    form = formulate_flows(fixed)
    seconds, size = Expression(), Expression()
    most_seconds = most_bytes = 0.0
    for name, table in fixed.blocks.items():
        count = fixed.graph.count(name)
        form.z[name] = {0: form.model.variable(1.0, lower=1.0)}
        add_storages(form, name, table, decide=True, offloads=False)
        storages = form.storages[name]
        for column, each in storages.seconds:
            add(seconds, {column: count * (each.forward + each.backward)})
        sizes = {column: storages.sizes[storage] for storage, column in storages.saved.items()}
        add(size, sizes, count * form.byte_unit)
        add(size, storages.held_bytes(form.problem.mesh.sizes)[0], count * form.byte_unit)
        most_seconds += count * sum(strategies[0].seconds.forward for strategies in table.strategies.values())
        most_bytes += count * form.byte_unit * sum(storages.sizes[storage] for storage in storages.needs)
    if not most_seconds or not most_bytes:
        return []
    shared_seconds = {column: each / most_seconds for column, each in seconds.items()}
    shared_bytes = {column: each / most_bytes for column, each in size.items()}
    frontier = Frontier(form.model, shared_seconds, shared_bytes, most_seconds, most_bytes, integer=True)
    frontier.halve(frontier.solve(1.0, ROUNDING), frontier.solve(ROUNDING, 1.0), _HALVINGS, _MIN_GAIN)
    corners = sorted(frontier.corners, key=lambda corner: -corner.bytes)
    return [{plan.block: plan for plan in decode(form, corner.values).blocks} for corner in corners]
