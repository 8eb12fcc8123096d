"""The knobs of a recipe, and a closed-form estimate that orders them: arithmetic and traffic of one layer, scaled. The few that
look best are priced exactly afterwards, so an estimate decides only what is looked at.

Sizes are in bytes and seconds of one device. Sources of the forms: arXiv 2104.04473, section 2.2 (bubbles), 2205.05198, section 4
(saved tensors under sequence parallelism), 1910.02054 (state).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.call_trace import CallTrace
from autopar.ir import dims
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.recipes.decoder import Architecture
from autopar.solve.space.grid import devices_per_node
from autopar.solve.space.meshes import divisors

_LARGEST_MICRO_BATCH = 32
_OVERLAPPED = 0.3
"""The share of a collective of the tensor axis that is left exposed where the software overlaps it with products."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder as a software writes it, a batch of sequences, and a cluster with that software's constants. `once`: a token is
    sent to each node once; `whole_experts`: the tensor axis does not cut inside experts; `sequence_parallel`: the software has
    it, and selective recomputation, which came with it (arXiv 2205.05198). `packed`: tokens of a sample where sequences are
    packed (0: they are not)."""

    decoder: Architecture
    layers: int
    batch: int
    cluster: Cluster
    precision: Precision
    optimizer: str = "adamw"
    float8: bool = False
    once: bool = False
    whole_experts: bool = False
    sequence_parallel: bool = True
    packed: int = 0


@dataclass(frozen=True, slots=True)
class Knobs:
    """One configuration: degrees of tensor, context and expert parallelism, pipeline stages with chunks, ZeRO stage and group,
    sequences of a micro-batch, recomputation (as `FixedConfiguration.recompute`)."""

    tensor: int = 1
    context: int = 1
    experts: int = 1
    stages: int = 1
    virtual: int = 1
    zero: int = 0
    group: int = 0
    micro: int = 1
    recompute: str = "none"

    def data(self, size: int) -> int:
        return size // (self.tensor * self.stages * self.context)

    def micro_batches(self, batch: int, size: int) -> int:
        return batch // (self.data(size) * self.micro)


def knobs_of(recipe: str, work: Workload) -> Iterator[Knobs]:
    """Every setting of a recipe (``ddp``, ``fsdp``, ``fsdp_tp``, ``megatron``) that divides model, batch and cluster."""
    size, decoder = work.cluster.size, work.decoder
    node = min(devices_per_node(work.cluster), size)
    for tensor in divisors(node) if recipe in ("fsdp_tp", "megatron") else [1]:
        if (recipe == "fsdp_tp" and tensor == 1) or decoder.heads % tensor or decoder.kv_heads % tensor or size % tensor:
            continue
        for stages, virtual in _pipelines(work, size // tensor) if recipe == "megatron" else [(1, 1)]:
            for context in _contexts(work, size // (tensor * stages)) if recipe == "megatron" else [1]:
                ranks = size // (tensor * stages)
                data = ranks // context
                if work.batch % data:
                    continue
                for experts in _expert_degrees(work, ranks * (tensor if work.whole_experts else 1), recipe):
                    yield from _batching(recipe, work, Knobs(tensor, context, experts, stages, virtual), data, node)


def _pipelines(work: Workload, ranks: int) -> Iterator[tuple[int, int]]:
    yield 1, 1
    for stages in divisors(ranks):
        if not 1 < stages <= min(work.layers, 64):
            continue
        deep = {-(-work.layers // stages), -(-(work.layers + 2) // stages)}
        for each in sorted({size for layers in deep for size in divisors(layers)}):
            virtual = -(-work.layers // (stages * each))
            chunks = stages * virtual
            if work.layers % chunks == 0 or (work.layers + 2) % chunks == 0 or (virtual == 1 and chunks <= work.layers):
                yield stages, virtual


def _contexts(work: Workload, ranks: int) -> list[int]:
    """Context parallelism keeps at least 4096 tokens of a sequence on a rank, as in published runs."""
    if work.decoder.latent is not None:
        return [1]
    return [degree for degree in divisors(ranks) if degree <= max(1, work.decoder.seq // 4096) and work.decoder.seq % degree == 0]


def _expert_degrees(work: Workload, ranks: int, recipe: str) -> list[int]:
    if not work.decoder.experts or recipe != "megatron":
        return [1]
    return [degree for degree in divisors(work.decoder.experts) if ranks % degree == 0 and degree <= 64]


def _batching(recipe: str, work: Workload, knobs: Knobs, data: int, node: int) -> Iterator[Knobs]:
    each = work.batch // data
    ranks = data * knobs.context
    sharding = {"ddp": [(0, 0)], "megatron": [(1, 0)]}.get(recipe, [(3, 0), (2, 0)])
    if recipe in ("fsdp", "fsdp_tp"):
        groups = (group for group in (node // knobs.tensor, 8 * node // knobs.tensor) if 1 < group < data and data % group == 0)
        sharding = [*sharding, *((3, group) for group in groups)]
    elif recipe == "megatron" and work.cluster.state_layout.owners_broadcast and node // knobs.tensor < data:
        sharding = [*sharding, (1, node // knobs.tensor)]  # InternEvo: parallel.zero1.size, a node by default
    for micro in divisors(each):
        count = each // micro
        if micro > _LARGEST_MICRO_BATCH or (knobs.virtual > 1 and count % knobs.stages) or count < knobs.stages:
            continue
        for zero, group in sharding:
            for recompute in _recomputations(recipe, work):
                yield replace(knobs, micro=micro, zero=zero if ranks > 1 else 0, group=group, recompute=recompute)


def _recomputations(recipe: str, work: Workload) -> tuple[str, ...]:
    if recipe == "megatron" and not work.sequence_parallel:
        return "none", "everything"
    return ("none", "selective", "everything") if recipe == "megatron" else ("none", "products", "full")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of a layer (the mean of them) on one device without any parallelism, of `sequences` sequences: seconds, bytes saved;
    seconds of head and loss; and numbers of parameters."""

    sequences: int
    seconds: float
    expert_seconds: float
    attention_seconds: float
    saved_bytes: float
    parameters: float
    expert_parameters: float
    head_seconds: float
    table_parameters: float

    @staticmethod
    def of(graph: Graph, traces: Mapping[str, CallTrace], sequences: int) -> LayerCost:
        """`traces` are those of the blocks of `graph` on one device."""
        inner = [block for block in graph.blocks if graph.count(block.name) > 1 or any("attention" in n.op for n in block.nodes)]
        layers = sum(graph.count(block.name) for block in inner)
        found = dict.fromkeys(("seconds", "attention", "routed", "saved", "parameters", "experts"), 0.0)
        for block in inner:
            trace, share = traces[block.name], graph.count(block.name) / layers
            found["seconds"] += share * _both_ways(trace)
            for plan in trace.plan.nodes:
                cost, op = trace.costs.node(plan), trace.costs.nodes[plan.node].op
                found["attention"] += share * cost.forward_seconds * ("attention" in op)
                found["routed"] += share * (cost.forward_seconds + cost.backward_seconds) * ("experts" in op)
            memory = trace.memory
            found["saved"] += share * (memory.internal_saved_bytes + sum(size for _, size in memory.boundary_saved_bytes))
            for parameter in block.parameters:
                if not parameter.buffer:
                    kind = "experts" if len(parameter.value.shape) == 3 else "parameters"
                    found[kind] += share * dims.numel(parameter.value.shape, 1)
        outer = [block for block in graph.blocks if block not in inner]
        return LayerCost(
            sequences=sequences,
            seconds=found["seconds"],
            expert_seconds=found["routed"],
            attention_seconds=found["attention"],
            saved_bytes=found["saved"],
            parameters=found["parameters"],
            expert_parameters=found["experts"],
            head_seconds=sum(_both_ways(traces[block.name]) for block in outer),
            table_parameters=float(max(dims.numel(p.value.shape, 1) for block in outer for p in block.parameters)),
        )


def _both_ways(trace: CallTrace) -> float:
    return sum(trace.seconds(backward=backward, exposed=False) for backward in (False, True))


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Of one sequence, and of several: between them, routed experts take a time of their own for reading their weights."""

    one: LayerCost
    several: LayerCost

    def experts_seconds(self, sequences: float, share: float) -> float:
        """Of routed experts of which a rank has the `share`, for the tokens of so many sequences."""
        each = max(0.0, (self.several.expert_seconds - self.one.expert_seconds) / (self.several.sequences - self.one.sequences))
        fixed = max(0.0, self.one.expert_seconds - each)
        return fixed * share + each * sequences


def estimated_seconds(knobs: Knobs, work: Workload, costs: LayerCosts) -> float:
    """Of a step."""
    cluster, decoder, layer = work.cluster, work.decoder, costs.one
    node = devices_per_node(cluster)
    near, far = cluster.links[0].bandwidth_bytes_per_second, cluster.links[-1].bandwidth_bytes_per_second
    split = knobs.tensor * knobs.context
    tokens = knobs.micro * decoder.seq / knobs.context
    again = {"none": 0.0, "selective": layer.attention_seconds, "products": layer.seconds / 6}.get(
        knobs.recompute, layer.seconds / 3
    )
    one = knobs.micro * (layer.seconds - layer.expert_seconds + again) / split
    cut = knobs.experts * (1 if work.whole_experts else knobs.tensor)
    one += costs.experts_seconds(knobs.micro / split, 1 / cut)
    moved = 8 * tokens * decoder.hidden * 2 * (knobs.tensor - 1) / knobs.tensor
    one += moved / near * (_OVERLAPPED if cluster.overlap.model_parallel else 1.0)
    if knobs.context > 1 and not cluster.overlap.model_parallel:
        one += (
            6
            * knobs.micro
            * decoder.seq
            * decoder.kv_heads
            * decoder.head_dim
            * 2
            / knobs.tensor
            / (near if split <= node else far)
        )
    if knobs.experts > 1:
        span = knobs.experts * (1 if work.whole_experts else knobs.tensor)
        copies = min(decoder.top_k, span / node) if work.once and span > node else decoder.top_k
        one += 4 * copies * tokens / knobs.tensor * decoder.hidden * 2 / (near if span <= node else far)
    stage = one * ceil(work.layers / (knobs.stages * knobs.virtual)) * knobs.virtual
    last = one * (work.layers // knobs.stages) + knobs.micro * layer.head_seconds / split
    count = knobs.micro_batches(work.batch, cluster.size)
    kept = _stage_parameters(knobs, work, layer)
    ranks = knobs.data(cluster.size) * knobs.context
    reach = knobs.group * knobs.tensor if knobs.group else ranks * knobs.tensor
    rate = (
        near if reach <= node else min(near, far * max(1, node // knobs.tensor))
    )  # every card of a node carries its ring's part
    device = cluster.device
    gradient = cluster.state_layout.gradient_bytes or 4
    accumulated = (
        kept * (2 + 2 * gradient) / (device.bandwidth_bytes_per_second * device.bandwidth_fraction) if count > 1 else 0.0
    )
    busy = max(stage, last) + accumulated
    exposed = 0.0
    if ranks > 1 and knobs.zero >= 3:
        busy = max(busy, kept * (2 + 2 + 4) / rate)
    elif ranks > 1:
        exposed = max(0.0, kept * 6 / rate - 0.7 * stage / knobs.virtual)
    return count * busy + (knobs.stages - 1) / knobs.virtual * stage + exposed


def _stage_parameters(knobs: Knobs, work: Workload, layer: LayerCost) -> float:
    """Elements of a rank of the first stage, before ZeRO."""
    cut = knobs.experts * (1 if work.whole_experts else knobs.tensor)
    whole = layer.parameters / knobs.tensor + layer.expert_parameters / cut
    return work.layers / knobs.stages * whole + layer.table_parameters / knobs.tensor * (2 if knobs.stages == 1 else 1)


def estimated_bytes(knobs: Knobs, work: Workload, layer: LayerCost) -> float:
    """Peak memory of a rank of the first stage."""
    layout, decoder = work.cluster.state_layout, work.decoder
    ranks = knobs.data(work.cluster.size) * knobs.context
    owners = max(1.0, (knobs.group or ranks) / (knobs.experts if layer.expert_parameters > layer.parameters else 1))
    kept = _stage_parameters(knobs, work, layer)
    gradient = layout.gradient_bytes or 4
    whole = (2 if layout.stored_compute else 0) * (knobs.zero < 3) + gradient * (knobs.zero < 2) + 12 * (knobs.zero == 0)
    sharded = 12 * (knobs.zero > 0) + gradient * (knobs.zero >= 2)
    state = kept * (whole + sharded / owners + (2 if not layout.stored_compute and knobs.zero < 3 else 0))
    tokens = knobs.micro * decoder.seq / knobs.context
    boundary = tokens * decoder.hidden * 2 / (knobs.tensor if work.sequence_parallel else 1)
    saved = knobs.micro * layer.saved_bytes / (knobs.tensor * knobs.context)
    if not layout.regathered_operands:
        saved += (2 if work.sequence_parallel else 4) * tokens * decoder.hidden * 2 * (1 - 1 / knobs.tensor)
    saved = boundary if knobs.recompute in ("full", "everything") else saved * (0.5 if knobs.recompute == "products" else 1)
    count = knobs.micro_batches(work.batch, work.cluster.size)
    chunks = min(count * knobs.virtual, (knobs.virtual - 1) * knobs.stages + 2 * knobs.stages - 1)
    layers = work.layers / knobs.stages * (min(count, knobs.stages) if knobs.virtual == 1 else chunks / knobs.virtual)
    head = tokens * decoder.vocab * 6 / knobs.tensor if knobs.stages == 1 else 0.0
    return (state + saved * layers + head + knobs.micro * layer.saved_bytes / (knobs.tensor * knobs.context)) + 2**31
