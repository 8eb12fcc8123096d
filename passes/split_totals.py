"""What a loss needs of the whole batch moves into a block of its own, which runs for all micro-batches before the first.

Before (a mean over the valid tokens; `count` is a sum over the batch that the labels alone determine)::

    Epilogue(hidden, labels): %sum = ap.cross_entropy_sum(...); %count = ap.count_valid(%labels); %loss = aten.div(%sum, %count)

After::

    EpilogueTotals(labels): %count = ap.count_valid(%labels)
    Epilogue(hidden, labels, count): %sum = ap.cross_entropy_sum(...); %loss = aten.div(%sum, %count)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.batch_axis import Total, ancestors, totals_of
from autopar.ir.graph import Call, Graph
from autopar.ir.plan import Candidate
from autopar.passes.base import fresh
from autopar.passes.part import part, produced


@dataclass(frozen=True, slots=True)
class Split:
    """A graph and its plan without the totals, the calls that make them, and how each of their outputs is reduced over the
    micro-batches. The calls' outputs are further inputs of the program."""

    graph: Graph
    candidate: Candidate
    calls: tuple[Call, ...] = ()
    ops: tuple[str, ...] = ()


def split_totals(graph: Graph, candidate: Candidate) -> Split:
    """Nothing changes for one micro-batch. PlanError where the batch cannot be taken in parts."""
    found = totals_of(graph, candidate) if candidate.micro_batches > 1 else ()
    split = Split(graph, candidate)
    for name in dict.fromkeys(total.block for total in found):
        split = _split_block(split, name, [total for total in found if total.block == name])
    return split


def _split_block(split: Split, name: str, found: Sequence[Total]) -> Split:
    graph, plan = split.graph, split.candidate.block(name)
    block = graph.block(name)
    made = {total.value for total in found}
    produced_at = produced(block, plan)
    values = block.values()
    ends = tuple(produced_at[total.value] for total in found)
    new = part(
        fresh(f"{name}Totals", {each.name for each in graph.blocks}),
        block,
        plan,
        [node.name for node in ancestors(block, made)],
        [total.value for total in found],
        ends,
    )
    rest = replace(
        block,
        inputs=(*block.inputs, *(values[total.value] for total in found)),
        nodes=tuple(node for node in block.nodes if not any(value.name in made for value in node.outputs)),
    )
    remaining = {node.name for node in rest.nodes}
    rest_plan = replace(
        plan,
        inputs=(*plan.inputs, *ends),
        nodes=tuple(node for node in plan.nodes if node.node in remaining),
        again=tuple(node for node in plan.again if node in remaining),
    )
    taken = {value.name for value in graph.inputs} | {value for call in graph.calls for value in call.outputs}
    call = next(each for each in graph.calls if each.block == name)
    names = tuple(fresh(total.value, taken) for total in found)
    first = new.call(call, names)
    after = replace(call, inputs=(*call.inputs, *names))
    return Split(
        replace(
            graph,
            blocks=(*(rest if each.name == name else each for each in graph.blocks), new.block),
            calls=tuple(after if each is call else each for each in graph.calls),
        ),
        replace(
            split.candidate,
            blocks=(*(rest_plan if each.block == name else each for each in split.candidate.blocks), new.plan),
        ),
        (*split.calls, first),
        (*split.ops, *(total.op for total in found)),
    )
