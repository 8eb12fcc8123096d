"""The formulas behind a cost, without and with its numbers. Each line's number is the evaluator's own for one call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.collectives import collective_seconds, explained
from autopar.cost_models.compute import Profile, local_shape, price, work_shards
from autopar.cost_models.devices import Device
from autopar.cost_models.formulas import formula
from autopar.cost_models.kernels import attention_efficiency, product_dtype, product_efficiency
from autopar.explain.ranking import Cost
from autopar.ir.plan import NodePlan

Line = tuple[str, float, str]
"""What it is of, its number, and the text."""


def formulas_of(cost: Cost, costs: Mapping[str, BlockCosts]) -> Iterator[Line]:
    """Of one operation: arithmetic of the forward, then forward and backward as a whole. Of a collective: its parts."""
    for kind, full_bytes, link in cost.parts:
        yield kind.replace("_", "-"), collective_seconds(kind, full_bytes, link), explained(kind, full_bytes, link)
    if cost.plan is not None:
        yield from _operation(costs[cost.block], cost.plan)


def _operation(costs: BlockCosts, plan: NodePlan) -> Iterator[Line]:
    known, device, sizes = costs.profile(plan.node), costs.cluster.device, costs.mesh.sizes
    if known.experts is not None:
        return
    silent = replace(known, kernels=(0, 0), special=0.0)
    none = (0,) * len(known.operand_bytes), (0,) * len(known.result_bytes)
    arithmetic = price(replace(silent, operand_bytes=none[0], result_bytes=none[1]), plan, sizes, device)[:2]
    streamed = price(replace(silent, forward_flops=0.0, backward_flops=0.0, matrix=None), plan, sizes, device)[:2]
    elements = known.special / prod(work_shards(plan.operands, plan.results, sizes))
    yield from _arithmetic(known, plan, sizes, device, arithmetic[0])
    found = formula("compute.operation.cpu" if device.kind == "cpu" else "compute.operation")
    rate = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    for index, name in enumerate(("forward", "backward")):
        values = {
            "arithmetic": arithmetic[index],
            "traffic": streamed[index] * rate,
            "bandwidth": device.bandwidth_bytes_per_second,
            "streams": device.bandwidth_fraction,
            "elements": elements * (1, 2 * (streamed[1] > 0))[index] if device.special_seconds else 0.0,
            "special": device.special_seconds,
            "kernels": float(known.kernels[index]),
            "launch": device.launch_seconds,
        }
        values = {key: values[key] for key in found.names}
        if found.value(values):
            yield name, found.value(values), found.explain(values)


def _arithmetic(known: Profile, plan: NodePlan, sizes: tuple[int, ...], device: Device, seconds: float) -> Iterator[Line]:
    """The product or the attention of the forward on one device."""
    if not seconds or known.matrix is None:
        return
    matrix, dtype = known.matrix, known.dtype
    left = local_shape(matrix.left, plan.operands[matrix.index], sizes)
    if known.attention:
        flops = known.forward_flops / prod(work_shards(plan.operands, plan.results, sizes))
        share = attention_efficiency(left[-2], left[-1], False) if device.multiprocessors else 1.0
        values = {"flops": flops, "efficiency": share, "pass_share": 1.0, "fraction": device.attention_fraction}
        found = formula("compute.attention")
    else:
        result = local_shape(matrix.result, plan.results[0], sizes)
        rows = result[-2] if matrix.batched else prod(result[:-1])
        count, n, k = prod(result[:-1]) // max(1, rows), result[-1], left[-1]
        dtype = product_dtype(device, dtype, n, k) if matrix.batched else dtype
        values = {"count": float(count), "m": float(rows), "n": float(n), "k": float(k), "fraction": device.matmul_fraction}
        values["efficiency"] = product_efficiency(count, rows, n, k, device.multiprocessors)
        found = formula("compute.product")
    values["peak"] = device.peak_flops_per_second(dtype)
    yield "arithmetic of the forward", found.value(values), found.explain(values)
