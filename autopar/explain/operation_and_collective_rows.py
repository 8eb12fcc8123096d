"""The costliest operations and collectives of a plan as rows of a report, with their places in the user's model, which
`cli.commands.explain` prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.breakdown.cost_breakdown import (
    CollectiveCost,
    CostBreakdown,
    OffloadCost,
    OperationCost,
    StateCollective,
)
from autopar.cost_models.breakdown.cost_formulas import CostFormula, collective_formulas, operation_formulas
from autopar.explain.reasons import COMPUTE
from autopar.ir.graph import Block, Graph, Node
from autopar.ir.plan import Conversion, NodePlan
from autopar.rules.conversions import changed_axis


@dataclass(frozen=True, slots=True)
class CostRow:
    """The row of an operation, collective, or copy to host memory of a distinct block.

    what: the operation or collective, in words.
    where, source: its place in the model, and its line in the user's code.
    times, seconds: its calls in a step of the stage (layers x micro-batches), and the time of all of them.
    axis, full_bytes: of a collective: its mesh axis, and the bytes of the unsharded tensor (of a copy: those of one device).
    cost: what it is the row of.
    """

    what: str
    where: str
    source: str
    times: int
    seconds: float
    cost: OperationCost | CollectiveCost | OffloadCost
    axis: str = ""
    full_bytes: float = 0.0


def module_path(graph: Graph, block: str, module: str = "") -> str:
    """Return the place in the user's model: ``model.layers.*.mlp.up_proj`` where several calls differ in a number."""
    prefixes = [call.prefix for call in graph.calls if call.block == block]
    parts = [prefix.split(".") for prefix in prefixes]
    if parts and len({len(each) for each in parts}) == 1:
        common = ".".join(words[0] if len(set(words)) == 1 else "*" for words in zip(*parts, strict=True))
    else:
        common = prefixes[0] if prefixes else block
    return ".".join(part for part in (common, module) if part) or graph.name


def operation_rows(graph: Graph, breakdown: CostBreakdown) -> list[CostRow]:
    """Return every operation, the costliest first. Communication inside named functions is in `collective_rows`."""
    out = []
    for cost in breakdown.operations:
        node = _node(graph, cost.block, cost.plan)
        what = f"{(cost.plan.function or node.op).split('.')[1]} {cost.plan.node}"
        where = module_path(graph, cost.block, node.module)
        out.append(CostRow(what, where, node.source, cost.times, cost.seconds, cost))
    return out


def collective_rows(graph: Graph, breakdown: CostBreakdown) -> list[CostRow]:
    """Return every collective, the costliest first, overlapped or exposed: of conversions, named functions, and state."""
    return [
        CostRow(*_collective_words(graph, cost), cost.times, cost.seconds, cost, cost.axis, cost.full_bytes)
        for cost in breakdown.collectives
    ]


def offload_rows(graph: Graph, breakdown: CostBreakdown) -> list[CostRow]:
    """Return the copies of offloaded tensors to host memory and back, the costliest first, overlapped or exposed."""
    out = []
    for cost in breakdown.offloads:
        what = ("saved tensors", module_path(graph, cost.block)) if cost.block else ("optimizer state", "all parameters")
        out.append(CostRow(*what, "", cost.times, cost.seconds, cost, full_bytes=cost.copied_bytes))
    return out


def other_operations(
    rows: Sequence[CostRow], breakdown: CostBreakdown, parts: Sequence[tuple[str, float]]
) -> list[tuple[str, float]]:
    """Return (what, seconds) of all of the step that is not in a table of operations: operations without a row of their own
    (`rows`), compute of no operation, and the `parts` of the step in which the device does not compute. With the table they add
    up to the step."""
    rest = sum(seconds for name, seconds in parts if name != COMPUTE)
    others = [(_more(rows, "operations"), sum(row.seconds for row in rows)), *breakdown.other_seconds, ("not computing", rest)]
    return [(name, seconds) for name, seconds in others if seconds]


def other_collectives(rows: Sequence[CostRow]) -> list[tuple[str, float]]:
    """Return (what, seconds) of collectives without a row of their own."""
    return [(_more(rows, "collectives"), sum(row.seconds for row in rows))] if rows else []


def _more(rows: Sequence[CostRow], what: str) -> str:
    return f"{len(rows)} more {what if len(rows) > 1 else what[:-1]}"


def row_formulas(row: CostRow, breakdown: CostBreakdown) -> Iterator[CostFormula]:
    """Return the formulas behind a row, each of one call: of an operation, or of each collective."""
    if isinstance(row.cost, OperationCost):
        return operation_formulas(row.cost, breakdown.costs[row.cost.block])
    return collective_formulas(row.cost) if isinstance(row.cost, CollectiveCost) else iter(())


def _collective_words(graph: Graph, cost: CollectiveCost) -> tuple[str, str, str]:
    """Return (what, where, source) of a collective."""
    block, origin = graph.block(cost.block), cost.origin
    if isinstance(origin, StateCollective) and origin.shared:
        return f"{origin.name}, ZeRO-{origin.zero}", "parameters that several blocks share", ""
    if isinstance(origin, StateCollective):
        in_model = any(call.prefix for call in graph.calls if call.block == cost.block)
        return f"{origin.name}, ZeRO-{origin.zero}", module_path(graph, cost.block) if in_model else cost.block, ""
    if isinstance(origin, NodePlan):
        node = _node(graph, cost.block, origin)
        name = (origin.function or node.op).split(".")[1]
        return f"inside {name} {origin.node}", module_path(graph, cost.block, node.module), node.source
    kinds = " / ".join(kind.replace("_", "-") for kind in cost.kinds)
    producer = _producer(block, origin)
    paths = {parameter.value.name: parameter.path for parameter in block.parameters}
    where = module_path(graph, cost.block, producer.module if producer else paths.get(origin.value, ""))
    return f"{kinds} of {origin.value}, {_change(origin)}", where, producer.source if producer else ""


def _change(conversion: Conversion) -> str:
    """Return ``S(0) -> R``, on the axis that changes."""
    axis = changed_axis(conversion.source, conversion.target)
    return f"{conversion.source[axis]} -> {conversion.target[axis]}"


def _producer(block: Block, conversion: Conversion) -> Node | None:
    return next((node for node in block.nodes for value in node.outputs if value.name == conversion.value), None)


def _node(graph: Graph, block: str, plan: NodePlan) -> Node:
    return next(node for node in graph.block(block).nodes if node.name == plan.node)
