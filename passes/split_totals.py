"""Moves what the loss needs of the whole batch into blocks of their own, run for all micro-batches before the first forward.

Before (a mean over valid tokens: `count` is a sum over the batch that depends on the labels only)::

    Epilogue(hidden, labels): %sum = ap.cross_entropy_sum(...); %count = ap.count_valid(%labels); %loss = aten.div(%sum, %count)

After (`count` of each micro-batch is summed over all of them, and is then an input)::

    EpilogueTotals(labels): %count = ap.count_valid(%labels)
    Epilogue(hidden, labels, count): %sum = ap.cross_entropy_sum(...); %loss = aten.div(%sum, %count)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.batch_totals import BatchTotal, candidate_totals
from autopar.ir.graph import Call, Graph, ancestors
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.plan import Candidate
from autopar.passes.base import fresh_name
from autopar.passes.extract_block import extract_block, produced_placements


@dataclass(frozen=True, slots=True)
class GraphAndTotals:
    """A graph and its plan without the totals, the calls that compute them, and how each output of these is reduced over the
    micro-batches (`ops`: sum, max, min). The calls' outputs are further inputs of the program."""

    graph: Graph
    candidate: Candidate
    calls: tuple[Call, ...] = ()
    ops: tuple[str, ...] = ()


def split_totals(graph: Graph, candidate: Candidate) -> GraphAndTotals:
    """Split off the totals; nothing changes for one micro-batch. PlanError where the batch cannot be split in micro-batches."""
    totals = candidate_totals(graph, candidate) if candidate.micro_batches > 1 else ()
    split = GraphAndTotals(graph, candidate)
    for name in dict.fromkeys(total.block for total in totals):
        split = _split_block(split, name, [total for total in totals if total.block == name])
    return _without_repeated_rests(split) if totals else split


def _without_repeated_rests(split: GraphAndTotals) -> GraphAndTotals:
    """Return the same without values that stages were to repeat, and of which what is left knows no number of examples: they are
    sent."""
    repeatable, pipeline = repeatable_values(split.graph), split.candidate.pipeline
    repeated = tuple(name for name in pipeline.repeated if name in repeatable)
    return replace(split, candidate=replace(split.candidate, pipeline=replace(pipeline, repeated=repeated)))


def _split_block(split: GraphAndTotals, name: str, block_totals: Sequence[BatchTotal]) -> GraphAndTotals:
    graph, plan = split.graph, split.candidate.block(name)
    block = graph.block(name)
    totals = {total.value for total in block_totals}
    produced_at = produced_placements(block, plan)
    values = block.values()
    placements = tuple(produced_at[total.value] for total in block_totals)
    extracted = extract_block(
        fresh_name(f"{name}Totals", {each.name for each in graph.blocks}),
        block,
        plan,
        [node.name for node in ancestors(block.nodes, totals)],
        [total.value for total in block_totals],
        placements,
    )
    remaining = replace(
        block,
        inputs=(*block.inputs, *(values[total.value] for total in block_totals)),
        nodes=tuple(node for node in block.nodes if not any(value.name in totals for value in node.outputs)),
    )
    remaining_nodes = {node.name for node in remaining.nodes}
    remaining_plan = replace(
        plan,
        inputs=(*plan.inputs, *placements),
        nodes=tuple(node for node in plan.nodes if node.node in remaining_nodes),
        recompute_nodes=tuple(node for node in plan.recompute_nodes if node in remaining_nodes),
    )
    calls = (*graph.calls, *split.calls)
    used_names = {value.name for value in graph.inputs} | {value for call in calls for value in call.outputs}
    total_calls: dict[tuple[tuple[str, ...], tuple[str, ...]], Call] = {}  # one for calls whose totals are the same

    def with_totals(call: Call) -> Call:
        alone = extracted.call(call, ())
        key = alone.inputs, alone.parameters
        if key not in total_calls:
            names = tuple(fresh_name(total.value, used_names) for total in block_totals)
            total_calls[key] = replace(alone, outputs=names)
        return replace(call, inputs=(*call.inputs, *total_calls[key].outputs))

    graph_calls = tuple(with_totals(each) if each.block == name else each for each in graph.calls)
    return GraphAndTotals(
        replace(
            graph,
            blocks=(*(remaining if each.name == name else each for each in graph.blocks), extracted.block),
            calls=graph_calls,
        ),
        replace(
            split.candidate,
            blocks=(*(remaining_plan if each.block == name else each for each in split.candidate.blocks), extracted.plan),
        ),
        (*split.calls, *total_calls.values()),
        (*split.ops, *(total.op for _ in total_calls for total in block_totals)),
    )
