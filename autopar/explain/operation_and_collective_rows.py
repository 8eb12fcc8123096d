"""The costliest operations and collectives of a plan as rows of a report, with their places in the user's model, which
`cli.commands.explain` prints; and their formulas with the numbers put in, whose values are the evaluator's own, of one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from autopar.cost_models.breakdown.cost_breakdown import (
    CollectiveCost,
    CostBreakdown,
    OffloadCost,
    OperationCost,
    StateCollective,
)
from autopar.cost_models.comm.collectives import collective_seconds, explain_collective
from autopar.cost_models.compute.kernels import (
    VECTOR_DTYPE,
    arithmetic_slowdown,
    attention_efficiency,
    product_efficiency,
    product_flops_per_second,
    rows_aligned,
)
from autopar.cost_models.compute.operations import Profile, local_shape, seconds_and_flops, work_shards
from autopar.cost_models.formulas.registry import formula
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.block_costs import BlockCosts
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


class CostFormula(NamedTuple):
    """A formula: its subject, its value, and its text with symbols and with numbers."""

    name: str
    seconds: float
    text: str


def collective_formulas(cost: CollectiveCost) -> Iterator[CostFormula]:
    """Yield one formula for each collective of a call."""
    for kind, full_bytes, link in cost.collectives:
        name = kind.replace("_", "-")
        yield CostFormula(name, collective_seconds(kind, full_bytes, link), explain_collective(kind, full_bytes, link))


def operation_formulas(cost: OperationCost, costs: BlockCosts) -> Iterator[CostFormula]:
    """Yield the formulas of the arithmetic of the forward, then forward and backward as a whole. `costs` are those of the
    operation's block."""
    plan, profile = cost.plan, costs.profile(cost.plan.node)
    whole, sizes = costs.cluster.device, costs.mesh.sizes
    device = replace(whole, fresh_page_bytes_per_second=0.0)
    if profile.experts is not None:
        return
    unlaunched = replace(profile, kernels=(0, 0), transcendental_elements=0.0)
    without_memory = replace(
        unlaunched, operand_bytes=(0,) * len(profile.operand_bytes), result_bytes=(0,) * len(profile.result_bytes)
    )
    pages = [seconds_and_flops(profile, plan, sizes, each)[:2] for each in (whole, device)]
    without_flops = replace(unlaunched, forward_flops=0.0, backward_flops=0.0, matrix=None)
    arithmetic = seconds_and_flops(without_memory, plan, sizes, device)[:2]
    streamed = seconds_and_flops(without_flops, plan, sizes, device)[:2]
    elements = profile.transcendental_elements / prod(work_shards(plan.operands, plan.results, sizes))
    yield from _arithmetic(profile, plan, sizes, device, arithmetic[0])
    operation = formula("compute.operation.cpu" if device.kind == "cpu" else "compute.operation")
    bandwidth, streams = device.bandwidth_bytes_per_second, device.bandwidth_fraction
    if profile.packs and device.product_bytes_per_second:
        bandwidth, streams = device.product_bytes_per_second, 1.0
    for index, name in enumerate(("forward", "backward")):
        values = {
            "arithmetic": arithmetic[index],
            "traffic": streamed[index] * bandwidth * streams,
            "bandwidth": bandwidth,
            "streams": streams,
            "elements": elements * (1, 2 * (streamed[1] > 0))[index] if device.transcendental_seconds else 0.0,
            "special": device.transcendental_seconds,
            "kernels": float(profile.kernels[index]),
            "launch": device.launch_seconds,
        }
        values = {key: values[key] for key in operation.names}
        fresh = pages[0][index] - pages[1][index]
        if operation.value(values):
            spelling = f"{name} without fresh pages" if fresh else name
            yield CostFormula(spelling, operation.value(values), operation.explain(values))
        if fresh:
            yield _with_fresh_pages(name, operation.value(values), fresh, whole)


def _with_fresh_pages(name: str, work_seconds: float, page_seconds: float, device: Device) -> CostFormula:
    pages, rate = formula("compute.fresh_pages"), device.fresh_page_bytes_per_second
    values = {"work": work_seconds, "fresh": page_seconds * rate, "pages": rate}
    return CostFormula(name, pages.value(values), pages.explain(values))


def _arithmetic(
    profile: Profile, plan: NodePlan, sizes: tuple[int, ...], device: Device, seconds: float
) -> Iterator[CostFormula]:
    """Yield the formula of the matrix product or the attention of the forward on one device."""
    if not seconds or profile.matrix is None:
        return
    matrix, dtype = profile.matrix, profile.dtype
    left = local_shape(matrix.left, plan.operands[matrix.index], sizes)
    if profile.attention:
        flops = profile.forward_flops / prod(work_shards(plan.operands, plan.results, sizes))
        share = attention_efficiency(left[-2], left[-1], False, profile.whole_attention) if device.multiprocessors else 1.0
        values = {
            "flops": flops,
            "efficiency": share,
            "pass_share": 1.0,
            "fraction": device.attention_share(profile.whole_attention),
        }
        attention = formula("compute.attention")
    else:
        result = local_shape(matrix.result, plan.results[0], sizes)
        rows = result[-2] if matrix.batched else prod(result[:-1])
        count, n, k = prod(result[:-1]) // max(1, rows), result[-1], left[-1]
        aligned = not matrix.batched or rows_aligned(device, dtype, n, k)
        reached, dtype = product_flops_per_second(device, dtype, aligned), dtype if aligned else VECTOR_DTYPE
        values = {"count": float(count), "m": float(rows), "n": float(n), "k": float(k)}
        values["fraction"] = reached / device.matrix_peak_flops_per_second(dtype)
        slowdown = arithmetic_slowdown(device, dtype) if matrix.batched else 1.0
        values["efficiency"] = product_efficiency(count, rows, n, k, device.multiprocessors, slowdown)
        attention = formula("compute.product")
    values["peak"] = device.matrix_peak_flops_per_second(dtype)
    yield CostFormula("arithmetic of the forward", attention.value(values), attention.explain(values))
