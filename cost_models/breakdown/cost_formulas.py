"""The formulas of one operation or collective, with its numbers put in. Each value is the evaluator's own, of one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

from autopar.cost_models.breakdown.cost_breakdown import CollectiveCost, OperationCost
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
from autopar.ir.plan import NodePlan


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
