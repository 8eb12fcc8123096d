"""Seconds of one operation on one device: FLOPs and memory traffic of its local shapes, priced by `kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.experts import Experts
from autopar.cost_models.flops import ATTENTION, CUTS, EXPERTS, FLOAT8, FLOPS, LOOKUPS, LOSSES, SPECIAL, VIEWS, Sizes, packet
from autopar.cost_models.hardware import Cluster, Device
from autopar.cost_models.inner import communicated, slowest
from autopar.cost_models.kernels import (
    SPECIAL_BACKWARD,
    attention_seconds,
    operation_seconds,
    product_dtype,
    product_seconds,
    streaming_seconds,
)
from autopar.cost_models.saved import Saved, saved_tensors
from autopar.cost_models.sizes import itemsize, shards
from autopar.ir import dims
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import NodePlan


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One operation on one device: `*_seconds` computing, `*_comm_seconds` what a named function communicates per mesh axis."""

    forward_seconds: float
    backward_seconds: float
    forward_flops: float
    backward_flops: float
    forward_comm_seconds: tuple[float, ...]
    backward_comm_seconds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward, computing and communicating."""
        return self.forward_seconds + self.backward_seconds + sum(self.forward_comm_seconds) + sum(self.backward_comm_seconds)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Global shapes of a product or of attention: `left` is operand number `index` (its last dimension is the inner one; for
    attention the queries), `result` what comes out. `batched`: leading dimensions are separate products, not rows."""

    index: int
    left: Sizes
    result: Sizes
    batched: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """What does not depend on placements: global FLOPs and bytes. `weights` of operands scale what the forward reads of them,
    `backward_*` what the backward reads or writes; `kernels` are launches (forward, backward), `special` elements of a
    transcendental function.
    """

    forward_flops: float
    backward_flops: float
    model_flops: float
    operand_bytes: Sizes
    result_bytes: Sizes
    forward_operands: tuple[float, ...]
    forward_results: tuple[float, ...]
    backward_operands: tuple[float, ...]
    backward_results: tuple[float, ...]
    kernels: tuple[int, int]
    dtype: str
    attention: bool = False
    matrix: Matrix | None = None
    experts: Experts | None = None
    special: float = 0.0


def profile(node: Node, values: Mapping[str, Value], batch: int) -> Profile:
    """FLOPs and traffic of `node` at the global batch. Backward: one product of the forward's size per gradient that is needed;
    attention recomputes its scores, five products for two (Dao et al., arXiv 2205.14135; model FLOPs count four). Everything
    else streams: what autograd needs is read once, the gradients of the results are read, those of operands written."""
    operands = [values[name] for name in node.operands()]
    a = [dims.values(value.shape, batch) for value in operands]
    out = [dims.values(value.shape, batch) for value in node.outputs]
    op = packet(node.op)
    needed = [value.differentiable and not node.no_grad for value in operands]
    backward = any(needed) and any(value.differentiable for value in node.outputs)
    needed = [need and backward for need in needed]
    flops = FLOPS[op](node, a, out) if op in FLOPS else 0.0
    attention = op in ATTENTION
    products = sum(needed[1:3] if op in ("aten.addmm", "aten.baddbmm") else needed[:2])
    weight_read = float(op not in VIEWS)
    reads = [weight_read] * len(a)
    if op in LOOKUPS:
        reads[0] = 0.0
    writes = [weight_read] * len(out)
    kept = saved_tensors(node, values) if backward else Saved((False,) * len(a), (False,) * len(out))
    same = [shape == out[0] for shape in a]
    back_operands, back_results = _backward_traffic(op, needed, same, kept, flops > 0)
    if op in LOSSES:  # the log-probabilities, written and read besides the logits; in place they are float32, twice as wide
        reads[0] += 4.0 if op == "ap.cross_entropy_in_place" else 2.0
    if op in LOOKUPS:
        writes = [2.0] * len(out)
    return Profile(
        flops,
        2.5 * flops * backward if attention else products * flops,
        flops * (1 + (2 * backward if attention else products)),
        tuple(prod(shape) * itemsize(value.dtype) for shape, value in zip(a, operands, strict=True)),
        tuple(prod(shape) * itemsize(value.dtype) for shape, value in zip(out, node.outputs, strict=True)),
        tuple(reads),
        tuple(writes),
        back_operands,
        back_results,
        (0 if op in VIEWS else 1, _kernels(op, products, back_results, flops > 0 and not attention)),
        "float8" if op in FLOAT8 else operands[0].dtype if operands else node.outputs[0].dtype,
        attention,
        _matrix(op, a, out),
        Experts.of(node, a, itemsize(operands[0].dtype)) if op in EXPERTS else None,
        float(prod(a[0])) if op in SPECIAL and a else 0.0,
    )


def _matrix(op: str, a: Sequence[Sizes], out: Sequence[Sizes]) -> Matrix | None:
    if op in ATTENTION:
        return Matrix(0, a[0], out[0], True)
    if op in ("aten.addmm", "aten.baddbmm"):
        return Matrix(1, a[1], out[0], op == "aten.baddbmm")
    if op in ("aten.linear", "ap.linear_kn", "ap.linear_float8", "aten.mm", "aten.bmm", "aten.matmul") and len(out[0]) > 1:
        return Matrix(0, a[0], out[0], len(a[1]) > 2)
    return None


def _kernels(op: str, products: int, backward: Sequence[float], is_product: bool) -> int:
    if not any(backward):
        return 0
    return max(1, products) if is_product else 1


def _backward_traffic(
    op: str, needed: Sequence[bool], same: Sequence[bool], kept: Saved, is_product: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How often the backward touches each operand (kept and read, gradient written) and each result (kept, gradient read).

    The gradient of a sum is handed on as it is, except where an operand was broadcast (`same` false): it is summed then.
    """
    results = len(kept.results)
    if not any(needed) or (op in VIEWS and op not in CUTS):
        return (0.0,) * len(needed), (0.0,) * results
    if op in ("aten.add", "aten.sub"):
        reduced = [need and not equal for need, equal in zip(needed, same, strict=True)]
        return tuple(map(float, reduced)), (float(sum(reduced)),) * results
    grads = float(max(1, sum(needed[:2]))) if is_product else 1.0
    read = tuple(float(need) + held for need, held in zip(needed, kept.operands, strict=True))
    return read, tuple(grads + held for held in kept.results)


def work_shards(operands: Sequence[Placements], results: Sequence[Placements], axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Per axis, into how many parts the work is cut: the axis size where any tensor of the operation is sharded on it, else 1
    (redundant, or a linear operation that hands on a Partial)."""
    out = []
    for axis, size in enumerate(axis_sizes):
        for placements in (*operands, *results):
            if type(placements[axis]) is Shard:
                out.append(size)
                break
        else:
            out.append(1)
    return tuple(out)


def price(known: Profile, plan: NodePlan, axis_sizes: Sequence[int], device: Device) -> tuple[float, float, float, float]:
    """Forward and backward seconds, forward and backward FLOPs of one rank."""
    work = prod(work_shards(plan.operands, plan.results, axis_sizes))
    if known.experts is not None:
        cuts = expert_cuts(plan, axis_sizes)
        return *known.experts.seconds(device, known.dtype, *cuts), known.forward_flops / work, known.backward_flops / work
    operands = [size / shards(place, axis_sizes) for size, place in zip(known.operand_bytes, plan.operands, strict=True)]
    results = [size / shards(place, axis_sizes) for size, place in zip(known.result_bytes, plan.results, strict=True)]
    forward = sum(map(float.__mul__, operands, known.forward_operands)) + sum(map(float.__mul__, results, known.forward_results))
    backward = sum(map(float.__mul__, operands, known.backward_operands)) + sum(
        map(float.__mul__, results, known.backward_results)
    )
    flops = known.forward_flops / work, known.backward_flops / work
    busy = _computing(known, plan, axis_sizes, device, flops)
    traffic = streaming_seconds(device, forward), streaming_seconds(device, backward)
    if device.special_seconds and known.special:
        special = known.special / work * device.special_seconds
        traffic = traffic[0] + special, traffic[1] + SPECIAL_BACKWARD * special * (backward > 0)
    first, second = (operation_seconds(device, *each) for each in zip(busy, traffic, known.kernels, strict=True))
    return first, second, *flops


def expert_cuts(plan: NodePlan, axis_sizes: Sequence[int]) -> tuple[int, int, int | None]:
    """Into how many parts copies of tokens are cut, the inside of each expert, and the experts (None: as the operation says)."""
    if len(plan.operands) < 5:
        return shards(plan.operands[0], axis_sizes), shards(plan.operands[2], axis_sizes), None
    copies = inside = experts = 1
    for token, up, size in zip(plan.operands[0], plan.operands[3], axis_sizes, strict=True):
        among = isinstance(up, Shard) and up.dim == 0
        copies *= size if among or isinstance(token, Shard) else 1
        experts *= size if among else 1
        inside *= size if isinstance(up, Shard) and not among else 1
    return copies, inside, experts


def share_of_copies(node: Node, plan: NodePlan, known: Profile, axis_sizes: Sequence[int], cluster: Cluster) -> float:
    """What the busiest rank has of the copies, beside what it has of the tokens: less where experts or their insides are cut."""
    if packet(node.op) != "ap.moe_experts":
        return 1.0
    copies, inside, _ = expert_cuts(plan, axis_sizes)
    return busiest_rank(known, plan, axis_sizes, cluster) * shards(plan.operands[0], axis_sizes) / (copies * inside)


def _computing(
    known: Profile, plan: NodePlan, axis_sizes: Sequence[int], device: Device, flops: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of the arithmetic, forward and backward, at the rates of the local shapes."""
    if not flops[0]:
        return 0.0, 0.0
    if known.matrix is None:
        rate = device.peak_flops_per_second(known.dtype) * device.matmul_fraction
        return flops[0] / rate, flops[1] / rate
    left = local_shape(known.matrix.left, plan.operands[known.matrix.index], axis_sizes)
    if known.attention:
        queries, head = left[-2:]
        forward = attention_seconds(device, known.dtype, flops[0], queries, head, False)
        return forward, attention_seconds(device, known.dtype, flops[1], queries, head, True)
    result = local_shape(known.matrix.result, plan.results[0], axis_sizes)
    rows = result[-2] if known.matrix.batched else prod(result[:-1])
    count, n, k = prod(result[:-1]) // max(1, rows), result[-1], left[-1]
    dtype = product_dtype(device, known.dtype, n, k) if known.matrix.batched else known.dtype
    forward = product_seconds(device, dtype, count, rows, n, k)
    to_left = product_seconds(device, dtype, count, rows, k, n)
    to_right = product_seconds(device, dtype, count, k, n, rows)
    return forward, (to_left + to_right) / 2 * (flops[1] / flops[0])


def local_shape(shape: Sizes, placements: Placements, axis_sizes: Sequence[int]) -> Sizes:
    """The part of one rank."""
    out = list(shape)
    for place, size in zip(placements, axis_sizes, strict=True):
        if type(place) is Shard:
            out[place.dim] = max(1, out[place.dim] // size)
    return tuple(out)


def node_cost(
    node: Node,
    values: Mapping[str, Value],
    plan: NodePlan,
    mesh: Mesh,
    batch: int,
    cluster: Cluster,
    known: Profile | None = None,
) -> NodeCost:
    """The cost of `node` under `plan` at the global `batch`. `known` is its `profile`, for callers that price many plans."""
    known = known or profile(node, values, batch)
    seconds = price(known, plan, mesh.sizes, cluster.device)
    busiest = busiest_rank(known, plan, mesh.sizes, cluster)
    if busiest != 1.0:
        seconds = busiest * seconds[0], busiest * seconds[1], *seconds[2:]
    if not plan.function:
        none = (0.0,) * len(mesh.sizes)
        return NodeCost(*seconds, none, none)
    slow = slowest(node, values, plan, mesh)
    forward, backward = slow * seconds[0], slow * seconds[1]
    work = work_shards(plan.operands, plan.results, mesh.sizes)
    inner = communicated(node, values, plan, mesh, batch, cluster, work, (forward, backward))
    if busiest != 1.0:
        inner = tuple(tuple(busiest * each for each in side) for side in inner)  # type: ignore[assignment]
    return NodeCost(forward, backward, *seconds[2:], *inner)


def busiest_rank(known: Profile, plan: NodePlan, axis_sizes: Sequence[int], cluster: Cluster) -> float:
    """Of experts that are dealt out: what the busiest rank gets of the copies over the mean."""
    if known.experts is None:
        return 1.0
    cut = expert_cuts(plan, axis_sizes)[2]
    return cluster.expert_load.busiest(known.experts.experts, cut) if cut else 1.0
