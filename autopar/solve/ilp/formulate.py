"""The ILP of one problem. Start here: `formulate` lists the groups of variables and constraints, each added by one function.

Distinct blocks appear once, with counts: nothing grows with depth. Every constraint has its formula as a comment; the columns are
listed in `formulation`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from autopar.cost_models.step.product_overlap import ProductOverlap, product_overlaps
from autopar.ir.placement import Placements, Replicate
from autopar.operations.losses import runs_in_chunks
from autopar.rules.loss_chunks import chunk_pairs
from autopar.solve.ilp.formulation import Expression, Formulation
from autopar.solve.ilp.linear_model import INFINITY, add, total
from autopar.solve.ilp.recompute_offload import add_storages
from autopar.solve.ilp.state_sharding import add_state_terms, add_zero_stages
from autopar.solve.ilp.step_time import add_block_seconds, add_step_seconds
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.forced_axes import REDUNDANT_SHARE, forced_work
from autopar.solve.problem.problem import BlockTable, Problem, StreamSeconds

_PENALTY = 300.0
"""Steps that a forced axis costs which repeats all FLOPs that it could shard."""


def formulate(problem: Problem, sharded_axes: Sequence[int] = (), recompute: bool = False) -> Formulation:
    """Return the program without the memory constraint, which `memory_events.add_memory_constraint` adds. `sharded_axes` are
    forced: they must not repeat FLOPs that they can shard. With `recompute` every tensor that the backward needs is saved,
    recomputed or offloaded; else all of them are saved."""
    form = formulate_flows(problem)
    if recompute:
        for name, table in problem.blocks.items():
            add_conversion_trees(form, table)
            add_storages(form, name, table, decide=True)
    add_zero_stages(form)
    add_state_terms(form)
    for name, table in problem.blocks.items():
        add_block_seconds(form, name, table)
    add_step_seconds(form)
    add_redundancy_limits(form, sharded_axes, problem.micro_batches)
    return form


def formulate_flows(problem: Problem, blocks: Collection[str] | None = None) -> Formulation:
    """Strategies, boundary placements and the conversion flows between them, without time, state and objective; of some `blocks`
    only, as if the others took whatever placements suit these."""
    tables = problem.blocks if blocks is None else {name: problem.blocks[name] for name in problem.blocks if name in blocks}
    form = Formulation(problem, _second_unit(problem, tables), problem.cluster.device.memory_bytes / 100)
    add_boundary_placements(form, blocks)
    for table in tables.values():
        add_strategies(form, table)
        for value in table.consumers:
            add_conversion_flow(form, table, value)
        add_collective_overlap(form, table)
    return form


def _second_unit(problem: Problem, blocks: Mapping[str, BlockTable]) -> float:
    """Return a unit in which the seconds of a micro-batch, in these blocks, are about a thousand."""
    least = sum(
        problem.graph.count(name) * min((each.seconds.forward + each.seconds.backward for each in strategies), default=0.0)
        for name, table in blocks.items()
        for strategies in table.strategies.values()
    )
    return max(least, 1e-9) / 1000


def add_boundary_placements(form: Formulation, blocks: Collection[str] | None = None) -> None:
    """Add w: one placement per boundary class (of some `blocks`)."""
    members = form.problem.boundary.members
    for number, allowed in form.problem.placements.items():
        if blocks is not None and not any(slot.block in blocks for slot in members[number]):
            continue
        form.w[number] = [form.model.binary() for _ in allowed]
        # sum_p w[class, p] = 1
        form.model.row([(w, 1.0) for w in form.w[number]], 1.0, 1.0)
        form.model.boundary_groups.append(tuple(form.w[number]))


def add_strategies(form: Formulation, table: BlockTable) -> None:
    """Add x: one strategy per operation."""
    for node, strategies in table.strategies.items():
        form.x[table.block.name, node] = form.model.shares(len(strategies), integer=True)
        # sum_s x[node, s] = 1
        form.model.row([(x, 1.0) for x in form.x[table.block.name, node]], 1.0, 1.0)
        form.model.strategy_groups.append(tuple(form.x[table.block.name, node]))
    for before, after in chunk_pairs(table.block):
        placed: dict[Placements, Expression] = {}
        for name, sign in ((before.name, 1.0), (after.name, -1.0)):
            for strategy, x in zip(table.strategies[name], form.x[table.block.name, name], strict=True):
                if runs_in_chunks(strategy.plan.function):
                    at = strategy.plan.results[0] if sign > 0 else strategy.plan.operands[0]
                    placed.setdefault(at, {})[x] = sign
        for terms in placed.values():
            # sum_s x[before, s in chunks, makes p] = sum_s x[after, s in chunks, takes p], for each placement p of the chunks
            form.model.row(terms, 0.0, 0.0)


def _class_terms(form: Formulation, slot: Slot) -> dict[Placements, Expression]:
    number = form.problem.boundary.classes[slot]
    return {at: {w: 1.0} for at, w in zip(form.problem.placements[number], form.w[number], strict=True)}


def _produced(form: Formulation, table: BlockTable, value: str) -> dict[Placements, Expression]:
    """Return per placement the expression (0 or 1) that says whether the value is produced there."""
    block = table.block
    for index, each in enumerate(block.inputs):
        if each.name == value:
            return _class_terms(form, Slot(block.name, "in", index))
    for index, parameter in enumerate(block.parameters):
        if parameter.value.name == value:
            return _class_terms(form, Slot(block.name, "param", index))
    node = next(node for node in block.nodes if any(output.name == value for output in node.outputs))
    index = [output.name for output in node.outputs].index(value)
    out: dict[Placements, Expression] = {}
    for strategy, x in zip(table.strategies[node.name], form.x[block.name, node.name], strict=True):
        out.setdefault(strategy.plan.results[index], {})[x] = 1.0
    return out


def _needed(form: Formulation, table: BlockTable, consumer: tuple[str, int]) -> dict[Placements, Expression]:
    """Return per placement the expression (0 or 1) that says whether the consumer needs the value there; none for a buffer's new
    value, which is always replicated."""
    name, index = consumer
    if name == "=":
        return {}
    if name == "":
        return _class_terms(form, Slot(table.block.name, "out", index))
    out: dict[Placements, Expression] = {}
    for strategy, x in zip(table.strategies[name], form.x[table.block.name, name], strict=True):
        out.setdefault(strategy.plan.operands[index], {})[x] = 1.0
    return out


def add_conversion_flow(form: Formulation, table: BlockTable, value: str) -> None:
    """Add y and f: one unit flows per consumer from the produced to the needed placement; a conversion is paid once, however many
    consumers use it."""
    model, conversions, consumers = form.model, table.conversions[value], table.consumers[value]
    produced = _produced(form, table, value)
    y = model.shares(len(conversions.edges), integer=True)
    form.y[table.block.name, value] = y
    replicated = (Replicate(),) * len(form.problem.mesh.sizes)
    number = {state: index for index, state in enumerate(conversions.states)}
    edges = [(edge.source, edge.target) for edge in conversions.edges]
    supply = [produced.get(state, {}) for state in conversions.states]
    for consumer in consumers:
        flow = y if len(consumers) == 1 else model.shares(len(conversions.edges))
        supplies = supply.copy()
        for state, terms in _needed(form, table, consumer).items():
            if state in number:
                supplies[number[state]] = total((1.0, supply[number[state]]), (-1.0, terms))
        constants = [0.0] * len(supplies)
        if consumer[0] == "=" and replicated in number:
            constants[number[replicated]] = 1.0
        # produced[p] + sum_into_p f = needed[p] + sum_out_of_p f, for each consumer
        model.conserve(edges, flow, supplies, constants)
        if flow is not y:
            # y[e] >= f[consumer, e]
            model.at_least_each(y, flow)


def add_collective_overlap(form: Formulation, table: BlockTable) -> None:
    """Add h: the seconds of collectives that run beside products (`product_overlap`): those of conversions into a placement that
    products read, or from one that a product makes."""
    for overlaps in product_overlaps(table.costs).values():
        for each in overlaps:
            sent, shared = _hidden_collectives(form, table, each)
            beside: dict[Placements, Expression] = {}
            for product in each.products if any(sent.values()) else ():
                for strategy, x in zip(table.strategies[product], form.x[table.block.name, product], strict=True):
                    if (at := each.product_placement(strategy.plan)) in sent and (most := each.product_seconds(strategy.plan)):
                        beside.setdefault(at, {})[x] = most / form.second_unit
            for at, products in beside.items():
                hidden, less = form.model.variable(), -form.second_unit
                on_link = less * (at in shared)
                seconds = StreamSeconds(0.0, less, 0.0, on_link) if each.backward else StreamSeconds(less, 0.0, on_link)
                form.overlap.setdefault(table.block.name, []).append((hidden, seconds))
                # h <= share sum_into_or_from_p y (collective)
                form.model.row(total((1.0, {hidden: 1.0}), (-1.0, sent[at])), -INFINITY, 0.0)
                # h <= sum_s x (products)
                form.model.row(total((1.0, {hidden: 1.0}), (-1.0, products)), -INFINITY, 0.0)


def _hidden_collectives(
    form: Formulation, table: BlockTable, overlap: ProductOverlap
) -> tuple[dict[Placements, Expression], set[Placements]]:
    """Return per placement the seconds of conversions that products may hide, and where they occupy a link of the data axis."""
    conversions, sent, shared = table.conversions[overlap.value], dict[Placements, Expression](), set[Placements]()
    for edge, y in zip(conversions.edges, form.y[table.block.name, overlap.value], strict=True):
        source, target = conversions.states[edge.source], conversions.states[edge.target]
        if seconds := overlap.collective_seconds(source, target):
            at = overlap.placement(source, target)
            sent.setdefault(at, {})[y] = seconds / form.second_unit
            if edge.seconds.backward_shared if overlap.backward else edge.seconds.forward_shared:
                shared.add(at)
    return sent, shared


def add_conversion_trees(form: Formulation, table: BlockTable) -> None:
    """Make the conversions of a value a tree: a plan holds at most one copy of a value in each placement."""
    for value, conversions in table.conversions.items():
        into: list[Expression] = [{} for _ in conversions.states]
        for edge, y in zip(conversions.edges, form.y[table.block.name, value], strict=True):
            into[edge.target][y] = 1.0
        produced = _produced(form, table, value)
        for state, paid in zip(conversions.states, into, strict=True):
            terms = total((1.0, paid), (1.0, produced.get(state, {})))
            if paid and len(terms) > 1:
                # produced[p] + sum_into_p y <= 1
                form.model.row(terms, -INFINITY, 1.0)


def add_redundancy_limits(form: Formulation, axes: Sequence[int], passes: int = 1) -> None:
    """Limit the share that a forced axis repeats of the FLOPs that it can shard; where a memory constraint or pins do not allow
    that, it is as small as can be (`forced_axes.why_disobeyed` says so then). `passes` of the model make the objective."""
    for work in forced_work(form.problem, axes):
        terms: Expression = {}
        for key, repeated in work.whole.items():
            add(terms, {x: flops / work.shardable for x, flops in zip(form.x[key], repeated, strict=True) if flops})
        if not terms:
            continue
        slack = form.model.variable(1.0)
        form.penalties[slack] = 1000.0 * _PENALTY * passes
        form.model.minimise({slack: form.penalties[slack]})
        # sum_s x * repeated flops / flops that can be sharded <= share + slack
        form.model.row(total((1.0, terms), (-1.0, {slack: 1.0})), -INFINITY, REDUNDANT_SHARE)
