"""Moves what the loss needs of the whole batch into blocks of their own, run for all micro-batches before the first forward.

Before (a mean over valid tokens: `count` is a sum over the batch that depends on the labels only)::

    Epilogue(hidden, labels): %sum = ap.cross_entropy_sum(...); %count = ap.count_valid(%labels); %loss = aten.div(%sum, %count)

After (`count` of each micro-batch is summed over all of them, and is then an input)::

    EpilogueTotals(labels): %count = ap.count_valid(%labels)
    Epilogue(hidden, labels, count): %sum = ap.cross_entropy_sum(...); %loss = aten.div(%sum, %count)

What earlier blocks compute for it (labels that are shifted before the layers, or the count itself) is computed there once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.batch_totals import candidate_totals, countable_values, planned_placements
from autopar.ir.graph import Call, Graph, Node, Ref, ancestors, map_arguments
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import BlockSlice, repeatable_values
from autopar.ir.placement import Partial, Placement
from autopar.ir.plan import Candidate
from autopar.passes.base import fresh_name
from autopar.passes.extract_block import RepeatedBlocks, extract_block, produced_placements


@dataclass(frozen=True, slots=True)
class GraphAndTotals:
    """A graph and its plan without the totals, the calls that compute them, and how each total is reduced over the micro-batches
    (`totals`: sum, max or min, by the names of results of these calls). The totals are further inputs of the program."""

    graph: Graph
    candidate: Candidate
    calls: tuple[Call, ...] = ()
    totals: Mapping[str, str] = field(default_factory=dict)


def split_totals(graph: Graph, candidate: Candidate) -> GraphAndTotals:
    """Split off the totals; nothing changes for one micro-batch. PlanError where the batch cannot be split in micro-batches."""
    totals = candidate_totals(graph, candidate) if candidate.micro_batches > 1 else ()
    if not totals:
        return GraphAndTotals(graph, candidate)
    used_names = {value.name for value in graph.inputs} | {value for call in graph.calls for value in call.outputs}
    calls = _TotalCalls(RepeatedBlocks(graph, candidate), countable_values(graph), used_names)
    split = graph, candidate
    for name in dict.fromkeys(total.block for total in totals):
        split = _split_block(*split, name, {total.value: total.op for total in totals if total.block == name}, calls)
    graph, candidate = split
    graph = replace(graph, blocks=(*graph.blocks, *calls.earlier.blocks))
    candidate = replace(candidate, blocks=(*candidate.blocks, *calls.earlier.plans))
    return GraphAndTotals(graph, _without_repeated_totals(graph, candidate), tuple(calls.calls), calls.totals)


def _without_repeated_totals(graph: Graph, candidate: Candidate) -> Candidate:
    """Return the plan without values that stages were to repeat, and that are totals now, which their block hands on: these are
    sent."""
    repeatable, pipeline = repeatable_values(graph), candidate.pipeline
    repeated = tuple(name for name in pipeline.repeated if name in repeatable)
    return replace(candidate, pipeline=replace(pipeline, repeated=repeated))


@dataclass(slots=True)
class _TotalCalls:
    """The calls of totals, and before them those of the earlier values that they read; equal ones are one."""

    earlier: RepeatedBlocks
    slices: Mapping[str, Sequence[BlockSlice]]
    used_names: set[str]
    calls: dict[Call, None] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    known: dict[Call | str, tuple[str, ...]] = field(default_factory=dict)

    def of_block(self, call: Call, ops: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the totals that a call, without outputs yet, of a block of totals computes."""
        if call not in self.known:
            self._add(self._earlier_calls(name for name in call.inputs if name in self.slices))
            self.known[call] = self._new(ops)
            self._add([replace(call, outputs=self.known[call])])
        return self.known[call]

    def of_value(self, name: str, op: str) -> str:
        """Return the name of the total that a value between calls is."""
        if name not in self.known:
            *before, last = self._earlier_calls([name])
            self._add(before)
            self.known[name] = self._new({name: op})
            self._add([replace(last, outputs=self.known[name])])
        return self.known[name][0]

    def _earlier_calls(self, names: Iterable[str]) -> list[Call]:
        wanted = sorted(names)
        return self.earlier.repeat(wanted, [self.slices[name] for name in wanted])

    def _add(self, calls: Iterable[Call]) -> None:
        self.calls.update(dict.fromkeys(calls))

    def _new(self, ops: Mapping[str, str]) -> tuple[str, ...]:
        names = tuple(fresh_name(total, self.used_names) for total in ops)
        self.totals.update(zip(names, ops.values(), strict=True))
        return names


def _split_block(
    graph: Graph, candidate: Candidate, name: str, ops: Mapping[str, str], total_calls: _TotalCalls
) -> tuple[Graph, Candidate]:
    """Return the graph and its plan with a block whose totals (by name, with how each is reduced) are inputs. What a use adds to
    a sum (``(losses.sum() + 0.1 * count) / count``) is each micro-batch's own value there, beside the total."""
    block, plan = graph.block(name), candidate.block(name)
    values, at = block.values(), planned_placements(block, plan, candidate.mesh.index(DATA_AXIS))
    added = {name for name, where, _ in at.uses(block) if name in ops and isinstance(where, Partial)}
    taken = set(values)
    read_as = {total: fresh_name(f"{total}_total", taken) if total in added else total for total in ops}
    positions = {value.name: index for index, value in enumerate(block.inputs)}
    own = {total: op for total, op in ops.items() if total not in positions}
    further = [*own, *(total for total in ops if total in positions and total in added)]
    produced_at = produced_placements(block, plan) | dict(zip(positions, plan.inputs, strict=True))
    extracted = extract_block(
        fresh_name(f"{name}Totals", {each.name for each in graph.blocks}),
        block,
        plan,
        [node.name for node in ancestors(block.nodes, own)],
        tuple(own),
        [produced_at[total] for total in own],
    )
    remaining = replace(
        block,
        inputs=(*block.inputs, *(replace(values[total], name=read_as[total]) for total in further)),
        nodes=tuple(
            _reading(node, at.operands[node.name], read_as)
            for node in block.nodes
            if not any(value.name in own and value.name not in added for value in node.outputs)
        ),
        outputs=tuple(_read(each, where, read_as) for each, where in zip(block.outputs, at.outputs, strict=True)),
    )
    remaining_nodes = {node.name for node in remaining.nodes}
    of_totals = (replace(each, value=read_as[each.value]) for each in plan.conversions if each.value in added)
    remaining_plan = replace(
        plan,
        inputs=(*plan.inputs, *(produced_at[total] for total in further)),
        nodes=tuple(node for node in plan.nodes if node.node in remaining_nodes),
        conversions=(*plan.conversions, *of_totals),
        recompute_nodes=tuple(node for node in plan.recompute_nodes if node in remaining_nodes),
    )

    def with_totals(call: Call) -> Call:
        names = dict(zip(own, total_calls.of_block(extracted.call(call, ()), own) if own else (), strict=True))
        names |= {total: total_calls.of_value(call.inputs[positions[total]], ops[total]) for total in ops if total in positions}
        inputs = [
            names[value.name] if value.name in names and value.name not in added else outer
            for value, outer in zip(block.inputs, call.inputs, strict=True)
        ]
        return replace(call, inputs=(*inputs, *(names[total] for total in further)))

    calls = tuple(with_totals(each) if each.block == name else each for each in graph.calls)
    blocks = [remaining if each.name == name else each for each in graph.blocks]
    plans = [remaining_plan if each.block == name else each for each in candidate.blocks]
    if own:
        blocks, plans = [*blocks, extracted.block], [*plans, extracted.plan]
    return replace(graph, blocks=tuple(blocks), calls=calls), replace(candidate, blocks=tuple(plans))


def _read(name: str, where: Placement, read_as: Mapping[str, str]) -> str:
    return name if isinstance(where, Partial) else read_as.get(name, name)


def _reading(node: Node, operands: Sequence[Placement], read_as: Mapping[str, str]) -> Node:
    """Return a node that reads totals by their names, but for those that it adds to a sum."""
    places = iter(operands)
    return map_arguments(lambda leaf: Ref(_read(leaf.name, next(places), read_as)) if isinstance(leaf, Ref) else leaf, node)
