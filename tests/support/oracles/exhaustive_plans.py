"""Every plan of a tiny graph, with its price: placements, recomputation, offload, state sharding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from typing import TypeVar

from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.cost_models.step.recompute import RecomputePlan, with_least_recompute
from autopar.cost_models.tensors.sizes import PlacedValue, aliases
from autopar.errors import PlanError
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.partition_saved import replicated_on
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate, Conversion
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import BlockTable, PricedConversions, Problem
from support.models.handwritten_blocks import Builder
from support.models.solver_graphs import graph_of

T = TypeVar("T")


def toy_graph(batch: int = 8, seq: int = 512, width: int = 512, calls: int = 4, dtype: str = "bfloat16") -> Graph:
    """A projection, ``h * gelu(h W)`` some times, and a sum: a call is_saved its input, the product and its GELU."""
    full = ("B", seq, width)
    first = Builder("Prologue", dtype)
    x = first.input("x", full, differentiable=False)
    prologue = first.block(first.op("aten.linear", x, first.parameter("w.weight", (width, width)), shape=full, name="first"))  # type: ignore[arg-type]
    b = Builder("Middle", dtype)
    hidden = b.input("hidden", full)
    one = b.op("aten.linear", hidden, b.parameter("v.weight", (width, width)), shape=full, name="product")
    two = b.op("aten.gelu", one, shape=full, name="bent")
    middle = b.block(b.op("aten.mul.Tensor", hidden, two, shape=full, name="out"))  # type: ignore[arg-type]
    end = Builder("Epilogue", dtype)
    epilogue = end.block(end.op("aten.sum", end.input("hidden", full), shape=(), name="loss"))  # type: ignore[arg-type]
    return graph_of((prologue, middle, epilogue), ("Prologue", *["Middle"] * calls, "Epilogue"), full, batch, dtype)


def priced_plans(problem: Problem, sharding: Sequence[Candidate] | None = None) -> list[tuple[Candidate, Evaluation]]:
    """All plans (of these shardings, else of all), each by the evaluator."""
    out = []
    for start in shardings(problem) if sharding is None else sharding:
        for blocks in product(*(tuple(_variants(problem, table, start)) for table in problem.blocks.values())):
            candidate = replace(start, blocks=blocks)
            out.append((candidate, evaluate(problem.graph, candidate, problem.cluster, problem.optimizer, problem.batch_costs)))
    return out


def best_seconds(plans: Sequence[tuple[Candidate, Evaluation]], memory_bytes: float) -> float:
    return min(found.step_seconds for _, found in plans if found.peak_memory_bytes <= memory_bytes)


def shardings(problem: Problem) -> Iterator[Candidate]:
    """All placements and conversions, everything saved and no state sharded."""
    for chosen in product(*problem.placements.values()):
        at = dict(zip(problem.placements, chosen, strict=True))
        for blocks in product(*(tuple(_plans(problem, table, at)) for table in problem.blocks.values())):
            batch = problem.graph.batch * problem.micro_batches
            yield Candidate(problem.mesh, blocks, batch, problem.precision, problem.micro_batches, problem.zero_group)


def _plans(problem: Problem, table: BlockTable, at: dict[int, Placements]) -> Iterator[BlockPlan]:
    block, classes = table.block, problem.boundary.classes

    def ends(side: str, count: int) -> tuple[Placements, ...]:
        return tuple(at[classes[Slot(block.name, side, index)]] for index in range(count))  # type: ignore[arg-type]

    inputs, parameters = ends("in", len(block.inputs)), ends("param", len(block.parameters))
    outputs = ends("out", len(block.outputs))
    names = [value.name for value in block.inputs] + [parameter.value.name for parameter in block.parameters]
    produced = dict(zip(names, inputs + parameters, strict=True))
    for choices in product(*(table.strategies[node.name] for node in block.nodes)):
        nodes = tuple(choice.plan for choice in choices)
        made, needs = dict(produced), {name: {where} for name, where in zip(block.outputs, outputs, strict=True)}
        for node, plan in zip(block.nodes, nodes, strict=True):
            made |= {value.name: where for value, where in zip(node.outputs, plan.results, strict=True)}
            for name, where in zip(node.operands(), plan.operands, strict=True):
                needs.setdefault(name, set()).add(where)
        trees = [tuple(_trees(name, table.conversions[name], made[name], wanted)) for name, wanted in needs.items()]
        for conversions in product(*trees):
            yield BlockPlan(block.name, inputs, parameters, outputs, nodes, tuple(chain(*conversions)), 0)


def _trees(value: str, priced: PricedConversions, source: Placements, needs: set[Placements]) -> Iterator[tuple[Conversion, ...]]:
    """All trees of legal conversions from the source whose leaves are needed, with one state between at most."""
    into: dict[Placements, list[Placements]] = {}
    for step in priced.edges:
        into.setdefault(priced.states[step.target], []).append(priced.states[step.source])
    ends = {need for need in needs if need != source}
    for more in _subsets([state for state in priced.states if state != source and state not in ends], 1):
        targets = [*ends, *more]
        for parents in product(*([at for at in into.get(target, ()) if at == source or at in targets] for target in targets)):
            if set(more) <= set(parents):
                conversions = _from_the_root(value, source, dict(zip(targets, parents, strict=True)))
                if conversions is not None:
                    yield conversions


def _from_the_root(value: str, source: Placements, parents: dict[Placements, Placements]) -> tuple[Conversion, ...] | None:
    out: list[Conversion] = []
    there = {source}
    while len(out) < len(parents):
        ready = [target for target, parent in parents.items() if parent in there and target not in there]
        if not ready:
            return None
        out += [Conversion(value, parents[target], target) for target in ready]
        there.update(ready)
    return tuple(out)


def _variants(problem: Problem, table: BlockTable, start: Candidate) -> Iterator[BlockPlan]:
    plan = start.block(table.block.name)
    stages = problem.zeros if any(not parameter.buffer for parameter in table.block.parameters) else problem.zeros[:1]
    for saved in dict.fromkeys(_recompute_variants(table, plan)):
        names = [state for state in RecomputePlan.of(table.costs, saved).saved if not state[0].endswith("+")]
        for away in _subsets(names) if problem.cluster.host is not None else [()]:
            whole = [state for state in names if state not in away and state[0] not in _from_the_batch(problem, table)]
            for parts in _partitions(problem, whole):
                yield from (replace(saved, offload=away, partition_saved=parts, zero=zero) for zero in stages)


def _from_the_batch(problem: Problem, table: BlockTable) -> set[str]:
    """Inputs of the block that the caller of the model holds whole."""
    batch = {value.name for value in problem.graph.inputs}
    calls = [call for call in problem.graph.calls if call.block == table.block.name]
    return {value.name for index, value in enumerate(table.block.inputs) if any(call.inputs[index] in batch for call in calls)}


def _partitions(problem: Problem, names: Sequence[PlacedValue]) -> Iterator[tuple[tuple[str, Placements, str], ...]]:
    """Every choice of tensors, each over one model axis on which it is replicated, if any."""
    mesh = problem.mesh
    axes = [axis for axis, size in enumerate(mesh.sizes) if size > 1 and mesh.names[axis] != DATA_AXIS]
    each = [[(), *(((value, at, mesh.names[axis]),) for axis in axes if replicated_on(at, axis))] for value, at in names]
    yield from (tuple(chain(*chosen)) for chosen in product(*each))


def _recompute_variants(table: BlockTable, plan: BlockPlan) -> Iterator[BlockPlan]:
    """For every set of tensors that may be saved, the least recomputation."""
    block: Block = table.block
    same = aliases(block, plan.nodes, plan.conversions)
    states = [(value.name, at) for value, at in zip(block.inputs, plan.inputs, strict=True)]
    for node, each in zip(block.nodes, plan.nodes, strict=True):
        states += [(value.name, at) for value, at in zip(node.outputs, each.results, strict=True)]
        states += [(saved.value, saved.placements) for saved in table.costs.saved_tensors(each)]
    states += [(arc.value, arc.target) for arc in plan.conversions]
    for saved in _subsets(list(dict.fromkeys(map(same.find, states)))):

        def is_saved(state: PlacedValue, saved: tuple[PlacedValue, ...] = saved) -> bool:
            return same.find(state) in saved

        try:
            yield with_least_recompute(table.costs, plan, is_saved)
        except PlanError:
            continue


def _subsets(items: Sequence[T], most: int = 99) -> Iterator[tuple[T, ...]]:
    return chain.from_iterable(combinations(items, count) for count in range(min(most, len(items)) + 1))
