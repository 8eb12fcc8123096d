"""Seconds and FLOPs of one operation on one rank: the FLOPs and the memory traffic of its local shapes, priced by `kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.compute.experts import ExpertsCost
from autopar.cost_models.compute.kernels import (
    TRANSCENDENTAL_BACKWARD,
    Convolution,
    attention_seconds,
    convolution,
    convolution_flops_per_second,
    fresh_page_seconds,
    operation_seconds,
    product_memory_seconds,
    product_seconds,
    rows_aligned,
    scaling_seconds,
    streaming_seconds,
)
from autopar.cost_models.compute.loss_chunks import chunk_count, gradient_bytes
from autopar.cost_models.compute.overlapped_collectives import exposed_collective_seconds, work_imbalance
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.tensors.saved_tensors import saved_tensors
from autopar.cost_models.tensors.sizes import itemsize, shard_count
from autopar.ir import dims
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import NodePlan
from autopar.ir.plan_file.document import SavedTensors
from autopar.operations.attention import packed_tokens, sees_all_keys
from autopar.operations.experts import ExpertShapes
from autopar.operations.losses import runs_in_chunks
from autopar.operations.operation import Operation, Sizes
from autopar.operations.table import operation


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One operation on one rank: `*_seconds` of compute, `*_comm_seconds` of exposed collectives inside the operation per mesh
    axis."""

    forward_seconds: float
    backward_seconds: float
    forward_flops: float
    backward_flops: float
    forward_comm_seconds: tuple[float, ...]
    backward_comm_seconds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Forward and backward, compute and exposed communication."""
        return self.forward_seconds + self.backward_seconds + sum(self.forward_comm_seconds) + sum(self.backward_comm_seconds)


@dataclass(frozen=True, slots=True)
class ProductShapes:
    """Global shapes of a matrix product or of attention: `left` is operand number `index` (its last dimension is the inner one;
    for attention the queries), `result` the output. `batched`: leading dimensions are separate products, not rows."""

    index: int
    left: Sizes
    result: Sizes
    batched: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """The part of an operation's cost that does not depend on placements: global FLOPs and bytes.

    forward_operands, forward_results, backward_operands, backward_results: how often a pass reads or writes the bytes of each
        operand and result.
    kernels: launches (forward, backward).
    matrix: shapes of a matrix product or of attention (None: the operation streams).
    transcendental_elements: elements of a transcendental function.
    temporaries, gradients: whether the forward makes a temporary, and the backward a gradient, as large as each operand.
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
    matrix: ProductShapes | None = None
    experts: ExpertsCost | None = None
    transcendental_elements: float = 0.0
    convolution: Convolution | None = None
    whole_attention: bool = False
    """Whether every query sees all keys."""
    packs: bool = False
    """Whether it is a matrix product, whose operands are packed on a CPU."""
    scaled: bool = False
    """Whether kernels of their own cast the operands to float8 (dynamic scaling)."""
    temporaries: tuple[bool, ...] = ()
    gradients: tuple[bool, ...] = ()

    @property
    def launches(self) -> tuple[int, int]:
        """The launches of the host, forward and backward."""
        return self.kernels if self.experts is None else self.experts.launches


def profile(node: Node, values: Mapping[str, Value], batch: int) -> Profile:
    """FLOPs and traffic of `node` at the global batch. Backward: one product of the forward's size per gradient that is needed;
    attention recomputes its scores, five products for two (Dao et al., arXiv 2205.14135; model FLOPs count four). Everything
    else streams: saved tensors and the gradients of the results are read once, gradients of operands are written once."""
    operands = [values[name] for name in node.operands()]
    a = [dims.shape_at(value.shape, batch) for value in operands]
    out = [dims.shape_at(value.shape, batch) for value in node.outputs]
    record = operation(node.op)
    needed = [value.differentiable and not node.no_grad for value in operands]
    backward = any(needed) and any(value.differentiable for value in node.outputs)
    needed = [need and backward for need in needed]
    flops = 0.0 if record.flops is None else record.flops(node, a, out)
    attention = record.attention
    products = sum(needed[record.left : record.left + 2])
    weight_read = float(not record.view)
    reads = [weight_read] * len(a)
    if reads and not record.view:
        reads[0] += 2 * (record.kernels[0] - 1)
    if record.lookup:
        reads[0] = 0.0
    writes = [weight_read] * len(out)
    saved = saved_tensors(node, values) if backward else SavedTensors((False,) * len(a), (False,) * len(out))
    same = [shape == out[0] for shape in a]
    back_operands, back_results = _backward_accesses(record, needed, same, saved, flops > 0)
    if record.loss:  # the log-probabilities, written and read besides the logits; in place they are float32, twice as wide
        reads[0] += 4.0 if record.in_place else 2.0
    if record.lookup:
        writes = [2.0] * len(out)
        if record.bag:  # a row of the table for each id
            writes[0] = 1.0 + a[1][0] / max(1, out[0][0])
    matrix = _matrix(node, a, out)
    return Profile(
        forward_flops=flops,
        backward_flops=2.5 * flops * backward if attention else products * flops,
        model_flops=flops * (1 + (2 * backward if attention else products)),
        operand_bytes=tuple(prod(shape) * itemsize(value.dtype) for shape, value in zip(a, operands, strict=True)),
        result_bytes=tuple(prod(shape) * itemsize(value.dtype) for shape, value in zip(out, node.outputs, strict=True)),
        forward_operands=tuple(reads),
        forward_results=tuple(writes),
        backward_operands=back_operands,
        backward_results=back_results,
        kernels=(0 if record.view else record.kernels[0], _kernels(record, products, back_results)),
        dtype="float8" if record.float8 else operands[0].dtype if operands else node.outputs[0].dtype,
        attention=attention,
        matrix=matrix,
        packs=matrix is not None and not attention,
        experts=_experts_cost(node, a, operands[0].dtype) if record.experts else None,
        transcendental_elements=float(prod(a[0])) if record.transcendental and a else 0.0,
        convolution=convolution(node, a, out),
        scaled=record.scaled,
        temporaries=tuple(record.loss and index == 0 for index in range(len(a))),
        gradients=tuple(need and accesses > 0 for need, accesses in zip(needed, back_operands, strict=True)),
        whole_attention=attention and sees_all_keys(node),
    )


def _experts_cost(node: Node, a: Sequence[Sizes], dtype: str) -> ExpertsCost:
    kwargs = dict(node.kwargs)
    facts = (bool(kwargs.get(name)) for name in ("recompute_activation", "permuted", "fused", "ragged"))
    return ExpertsCost(ExpertShapes.of(node.op, node.args, kwargs, a), itemsize(dtype), *facts)


def _matrix(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> ProductShapes | None:
    record = operation(node.op)
    if record.attention:
        queries = min(packed_tokens(node) or a[0][-2], a[0][-2])
        return ProductShapes(0, (*a[0][:-2], queries, a[0][-1]), out[0], True)
    if not record.product or len(out[0]) < 2:
        return None
    return ProductShapes(record.left, a[record.left], out[0], len(a[record.left + 1]) > 2)


def _kernels(record: Operation, products: int, backward: Sequence[float]) -> int:
    if not any(backward):
        return 0
    return max(1, products) if record.flops is not None and not record.attention else record.kernels[1]


def _backward_accesses(
    record: Operation, needed: Sequence[bool], same: Sequence[bool], saved: SavedTensors, is_product: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return how often the backward reads or writes each operand (saved: read, gradient: written) and each result (both read).

    The gradient of a sum is passed through without a kernel, except where an operand was broadcast (`same` false) and is summed.
    """
    results = len(saved.results)
    if not any(needed) or (record.view and not record.slices):
        return (0.0,) * len(needed), (0.0,) * results
    if record.sum:
        reduced = [need and not equal for need, equal in zip(needed, same, strict=True)]
        return tuple(map(float, reduced)), (float(sum(reduced)),) * results
    grads = float(max(1, sum(needed[:2]))) if is_product else 1.0
    read = [float(need) + is_saved for need, is_saved in zip(needed, saved.operands, strict=True)]
    read[0] += 2 * (record.kernels[1] - 1)
    return tuple(read), tuple(grads + is_saved for is_saved in saved.results)


def work_shards(operands: Sequence[Placements], results: Sequence[Placements], axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return for each axis how many ways the work is sharded: the axis size where any tensor of the operation is sharded on it,
    else 1 (redundant, or a linear operation that passes a Partial through)."""
    out = []
    for axis, size in enumerate(axis_sizes):
        for placements in (*operands, *results):
            if type(placements[axis]) is Shard:
                out.append(size)
                break
        else:
            out.append(1)
    return tuple(out)


def seconds_and_flops(
    known: Profile, plan: NodePlan, axis_sizes: Sequence[int], device: Device, chunks: int = 1
) -> tuple[float, float, float, float]:
    """Forward and backward seconds, forward and backward FLOPs of one rank. `chunks` of a product's rows are computed one after
    another: each reads the weight, and adds to its gradient."""
    work = prod(work_shards(plan.operands, plan.results, axis_sizes))
    if known.experts is not None:
        cuts = expert_shards(plan, axis_sizes)
        return *known.experts.seconds(device, known.dtype, *cuts), known.forward_flops / work, known.backward_flops / work
    operands = [size / shard_count(place, axis_sizes) for size, place in zip(known.operand_bytes, plan.operands, strict=True)]
    results = [size / shard_count(place, axis_sizes) for size, place in zip(known.result_bytes, plan.results, strict=True)]
    forward = sum(map(float.__mul__, operands, known.forward_operands)) + sum(map(float.__mul__, results, known.forward_results))
    backward = sum(map(float.__mul__, operands, known.backward_operands)) + sum(
        map(float.__mul__, results, known.backward_results)
    )
    if chunks > 1 and known.matrix is not None:
        forward += (chunks - 1) * operands[1] * known.forward_operands[1]
        backward += (chunks - 1) * operands[1] * (known.backward_operands[1] + known.gradients[1])
    flops = known.forward_flops / work, known.backward_flops / work
    busy = _computing(known, plan, axis_sizes, device, flops, chunks)
    seconds_of = product_memory_seconds if known.packs else streaming_seconds
    traffic = seconds_of(device, forward), seconds_of(device, backward)
    if device.transcendental_seconds and known.transcendental_elements:
        special = known.transcendental_elements / work * device.transcendental_seconds
        traffic = traffic[0] + special, traffic[1] + TRANSCENDENTAL_BACKWARD * special * (backward > 0)
    first, second = (operation_seconds(device, *each) for each in zip(busy, traffic, known.kernels, strict=True))
    if known.scaled:
        casts = scaling_seconds(device, sum(operands[:2]), results[0])
        first, second = first + casts[0], second + casts[1] * (backward > 0)
    if device.fresh_page_bytes_per_second:
        new = [size for size, writes in zip(results, known.forward_results, strict=True) if writes]
        new += [size for size, is_new in zip(operands, known.temporaries, strict=False) if is_new]
        gradients = (size for size, is_new in zip(operands, known.gradients, strict=False) if is_new)
        first, second = first + fresh_page_seconds(device, new), second + fresh_page_seconds(device, gradients)
    return first, second, *flops


def expert_shards(plan: NodePlan, axis_sizes: Sequence[int]) -> tuple[int, int, int | None]:
    """Return how many ways token copies, the inner dimension of each expert, and the experts are sharded (None: as the operation
    says)."""
    if len(plan.operands) < 5:
        return shard_count(plan.operands[0], axis_sizes), shard_count(plan.operands[2], axis_sizes), None
    copies = inside = experts = 1
    for token, up, size in zip(plan.operands[0], plan.operands[3], axis_sizes, strict=True):
        among = isinstance(up, Shard) and up.dim == 0
        copies *= size if among or isinstance(token, Shard) else 1
        experts *= size if among else 1
        inside *= size if isinstance(up, Shard) and not among else 1
    return copies, inside, experts


def token_copy_share(node: Node, plan: NodePlan, known: Profile, axis_sizes: Sequence[int], cluster: Cluster) -> float:
    """Share of the token copies that the busiest rank holds, over its share of the tokens: less than 1 where experts or their
    inner dimension are sharded."""
    record = operation(node.op)
    if not record.experts:
        return 1.0
    if record.published:
        return _sliced_share(node, plan, known, axis_sizes)
    copies, inside, _ = expert_shards(plan, axis_sizes)
    return expert_imbalance(known, plan, axis_sizes, cluster) * shard_count(plan.operands[0], axis_sizes) / (copies * inside)


def _sliced_share(node: Node, plan: NodePlan, known: Profile, axis_sizes: Sequence[int]) -> float:
    """Return the share of ``ap.experts``, whose tokens are whole where an axis slices the experts: of what is saved of a copy,
    its input stays whole and the activations inside the expert are sliced."""
    if known.experts is None:
        return 1.0
    inside = prod(
        size for place, size in zip(plan.operands[2], axis_sizes, strict=True) if place == Shard(1) or place == Shard(1, 2)
    )
    shapes, product = known.experts.shapes, 0.5 if operation(node.op).float8 else 1.0
    inner = product * shapes.down + shapes.up
    return (product * shapes.hidden + inner / inside) / (product * shapes.hidden + inner)


def _computing(
    known: Profile, plan: NodePlan, axis_sizes: Sequence[int], device: Device, flops: tuple[float, float], chunks: int
) -> tuple[float, float]:
    """Seconds of matrix products (of so many chunks of rows) or attention, forward and backward, at the rates of the local
    shapes."""
    if not flops[0]:
        return 0.0, 0.0
    if known.convolution is not None:
        image = local_shape(known.convolution.image, plan.operands[0], axis_sizes)
        made = local_shape(known.convolution.result, plan.results[0], axis_sizes)
        rate = convolution_flops_per_second(device, known.dtype, known.convolution, image, made)
        return flops[0] / rate, flops[1] / rate
    if known.matrix is None:
        rate = device.convolution_flops_per_second(known.dtype)
        return flops[0] / rate, flops[1] / rate
    left = local_shape(known.matrix.left, plan.operands[known.matrix.index], axis_sizes)
    if known.attention:
        queries, head = left[-2:]
        forward = attention_seconds(device, known.dtype, flops[0], queries, head, False, known.whole_attention)
        return forward, attention_seconds(device, known.dtype, flops[1], queries, head, True, known.whole_attention)
    result = local_shape(known.matrix.result, plan.results[0], axis_sizes)
    rows = result[-2] if known.matrix.batched else prod(result[:-1])
    count, n, k = prod(result[:-1]) // max(1, rows), result[-1], left[-1]
    count, rows = count * chunks, -(-rows // chunks)
    batched = known.matrix.batched
    aligned = not batched or rows_aligned(device, known.dtype, n, k)
    forward = product_seconds(device, known.dtype, count, rows, n, k, aligned, batched)
    to_left = product_seconds(device, known.dtype, count, rows, k, n, aligned, batched)
    to_right = product_seconds(device, known.dtype, count, k, n, rows, aligned, batched)
    return forward, (to_left + to_right) / 2 * (flops[1] / flops[0])


def local_shape(shape: Sizes, placements: Placements, axis_sizes: Sequence[int]) -> Sizes:
    """The shard of one rank."""
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
    chunks = chunk_count(node, values, plan, mesh.sizes, batch)
    seconds = seconds_and_flops(known, plan, mesh.sizes, cluster.device, chunks)
    busiest = expert_imbalance(known, plan, mesh.sizes, cluster)
    if busiest != 1.0:
        seconds = busiest * seconds[0], busiest * seconds[1], *seconds[2:]
    function = operation(node.op).function(plan.function)
    if not plan.function and function.imbalance is None:
        none = (0.0,) * len(mesh.sizes)
        return NodeCost(*seconds, none, none)
    if function.pads:
        seconds = *_with_padded_copies(known, plan, mesh.sizes, cluster.device, seconds[:2]), *seconds[2:]
    imbalance = work_imbalance(node, values, plan, mesh)
    forward, backward = imbalance * seconds[0], imbalance * seconds[1]
    work = work_shards(plan.operands, plan.results, mesh.sizes)
    exposed = exposed_collective_seconds(node, values, plan, mesh, batch, cluster, work, (forward, backward))
    if busiest != 1.0:
        exposed = tuple(tuple(busiest * each for each in side) for side in exposed)  # type: ignore[assignment]
    if runs_in_chunks(plan.function):  # the backward scales the gradients that the forward has made
        scaled = streaming_seconds(cluster.device, 2 * gradient_bytes(node, values, plan.operands, mesh.sizes, batch))
        return NodeCost(forward + backward, scaled, seconds[2] + seconds[3], 0.0, *exposed)
    return NodeCost(forward, backward, *seconds[2:], *exposed)


def _with_padded_copies(
    known: Profile, plan: NodePlan, axis_sizes: Sequence[int], device: Device, seconds: tuple[float, float]
) -> tuple[float, float]:
    """The forward copies the shard of an image beside the neighbours' rows; the backward does so again, and copies its
    gradient."""
    copy = streaming_seconds(device, 2 * known.operand_bytes[0] / shard_count(plan.operands[0], axis_sizes))
    return seconds[0] + copy, seconds[1] + 2 * copy * (known.backward_operands[0] > 0)


def expert_imbalance(known: Profile, plan: NodePlan, axis_sizes: Sequence[int], cluster: Cluster) -> float:
    """Token copies of the busiest rank over the mean, where experts are distributed over ranks; else 1."""
    if known.experts is None:
        return 1.0
    cut = expert_shards(plan, axis_sizes)[2]
    return cluster.expert_load.imbalance(known.experts.shapes.experts, cut) if cut else 1.0
