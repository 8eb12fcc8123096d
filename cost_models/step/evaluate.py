"""The ground-truth cost of a plan, which simulates one training step of a candidate, call by call. The solver's own plans are
judged by it.

Order of the models: `call_trace` (one call of a block) -> `chunk_costs` (micro-batches of a model chunk, with its FSDP
communication) -> `stage_times` (pipeline schedule) and `stage_memory` (peak of each stage) -> `Evaluation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.hardware.mesh_links import check_mesh
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import HOST_LINK, LAUNCHES, CallTrace, costs_as_run
from autopar.cost_models.step.chunk_costs import ChunkCost, chunk_costs
from autopar.cost_models.step.pipeline_clock import splits_backward
from autopar.cost_models.step.product_overlap import LEAST_ELEMENTS, product_overlaps
from autopar.cost_models.step.stage_devices import stage_cluster, stage_clusters
from autopar.cost_models.step.stage_memory import StageMemory, stage_memories
from autopar.cost_models.step.stage_times import StageTime, stage_times
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.plan import BlockPlan, Candidate
from autopar.schedules.pipeline_schedule import chunks_of_stages

_MAX_TRACES = 8
"""Traces of one block on one mesh that are remembered."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The cost of one step of a candidate, all micro-batches together.

    step_seconds: when the bottleneck stage ends. The next five are of that stage and add up to it:
    compute_seconds, exposed_seconds: compute, and exposed communication of the model axes.
    stall_seconds: it waits for the data axis (all-gathers of weights, reductions of gradients).
    bubble_seconds: it waits for other pipeline stages.
    optimizer_seconds: the update.
    axis_seconds: per mesh axis, communication of that stage, overlapped or exposed.
    exposed_axis_seconds: per mesh axis, the exposed communication between and inside operations: with the stalls on the host they
        add up to `exposed_seconds`.
    redundant_share: per mesh axis, the share of FLOPs that every rank of the axis repeats.
    model_flops: of one step over all devices, without recomputation; causal attention counts half.
    mfu: model FLOPs utilization.
    stages, stage_memory: per pipeline stage.
    host_stall_seconds, launch_stall_seconds: the parts of `exposed_seconds` in which nothing hides the copies of offloaded
        tensors, and in which the device waits for the host to launch kernels.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    stall_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    axis_seconds: tuple[tuple[str, float], ...]
    redundant_share: tuple[tuple[str, float], ...]
    model_flops: float
    tflops_per_device: float
    mfu: float
    stages: tuple[StageTime, ...]
    stage_memory: tuple[StageMemory, ...]
    host_stall_seconds: float = 0.0
    launch_stall_seconds: float = 0.0
    exposed_axis_seconds: tuple[tuple[str, float], ...] = ()

    @property
    def bottleneck(self) -> int:
        """The stage that ends last."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].end_seconds)

    @property
    def bubble_share(self) -> float:
        """The bubble of a stage as a share of the step, on average over the stages."""
        if not self.step_seconds:
            return 0.0
        return sum(stage.bubble_seconds for stage in self.stages) / len(self.stages) / self.step_seconds

    @property
    def fullest_stage(self) -> StageMemory:
        """The memory of the stage that exceeds its devices' budget by most, or leaves least of it."""
        return max(self.stage_memory, key=lambda each: each.peak_bytes - each.budget_bytes)

    @property
    def peak_memory_bytes(self) -> int:
        """The peak memory of the fullest stage."""
        return self.fullest_stage.peak_bytes

    @property
    def memory_capacity_bytes(self) -> int:
        """The memory of the devices of the fullest stage."""
        return self.fullest_stage.capacity_bytes

    @property
    def memory_budget_bytes(self) -> int:
        """The memory that a plan may take on the devices of the fullest stage: their capacity without the margin."""
        return self.fullest_stage.budget_bytes

    @property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """The memory by (kind, bytes) of the fullest stage at its peak."""
        return tuple(self.fullest_stage.table.items())

    @property
    def fits(self) -> bool:
        """No stage exceeds the memory budget of its devices, nor that of their hosts."""
        fullest = self.fullest_stage
        return fullest.peak_bytes <= fullest.budget_bytes and all(each.host_fits for each in self.stage_memory)

    @property
    def can_run(self) -> bool:
        """No stage is sure to run out of memory: its tensors, the context and the communicators are within the capacity. A plan
        that does not fit may run, where the allocator gives back what it does not need."""
        return all(each.least_bytes <= each.capacity_bytes for each in self.stage_memory)


def evaluate(
    graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str = "adamw", costs: Mapping[str, BlockCosts] | None = None
) -> Evaluation:
    """Simulate one training step of `candidate`. ClusterError where the mesh is not the cluster's size.

    `costs` are those of the blocks by name, where the caller has them for this graph, mesh, batch and cluster already.
    """
    traces_of = stage_traces(graph, candidate, cluster, costs)
    chunks = chunk_costs(graph, candidate, cluster, traces_of, optimizer_named(optimizer))
    stages = stage_times(graph, candidate, cluster, traces_of, chunks)
    memory = stage_memories(graph, candidate, cluster, traces_of, [chunk.owned for chunk in chunks])
    return _summary(graph, candidate, cluster, traces_of, chunks, stages, memory)


def stage_traces(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts] | None = None,
    split_backward: bool | None = None,
) -> list[dict[str, CallTrace]]:  # fmt: skip
    """Trace one call of each block by name, on the devices of each stage. `split_backward`: under a schedule that splits
    backwards (None: under the candidate's)."""
    clusters = stage_clusters(cluster, candidate.pipeline.stages)
    check_mesh(clusters[0], candidate.mesh)
    if split_backward is None:
        split_backward = splits_backward(candidate.pipeline, candidate.micro_batches)
    traces_of: dict[Device, dict[str, CallTrace]] = {}
    for each in clusters:
        if each.device not in traces_of:
            known_costs = (costs or {}) if each.device == cluster.device else {}
            traces_of[each.device] = _block_traces(graph, candidate, each, known_costs, split_backward)
    return [traces_of[each.device] for each in clusters]


def async_tp_of(graph: Graph, candidate: Candidate, cluster: Cluster) -> dict[str, int]:
    """Return the mesh axes of a plan on which collectives run in pieces with products, with the elements that a tensor has at
    least whose collective does."""
    axes = set[int]()
    for trace in (trace for traces in stage_traces(graph, candidate, cluster) for trace in traces.values()):
        overlaps, plans = product_overlaps(trace.costs), {node.node: node for node in trace.plan.nodes}
        for each, conversion in ((each, at) for at in trace.plan.conversions for each in overlaps.get(at.value, ())):
            if each.axis is not None and each.hidden_seconds(conversion, plans):
                axes.add(each.axis)
    return {candidate.mesh.axes[axis].name: LEAST_ELEMENTS for axis in sorted(axes)}


def _block_traces(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts], split_backward: bool
) -> dict[str, CallTrace]:
    """Trace every block on the devices of one stage."""
    out = {}
    for block in graph.blocks:
        mesh, batch, plan = candidate.mesh, candidate.micro_batch, candidate.block(block.name)
        known = costs.get(block.name) or BlockCosts(block, mesh, batch, cluster, candidate.zero_group)
        out[block.name] = _call_trace(costs_as_run(known, plan, split_backward), plan)
    return out


def _call_trace(costs: BlockCosts, plan: BlockPlan) -> CallTrace:
    """Trace one call of a block. Candidates that are compared have most of their plans in common, each the same object."""
    traces = costs.traces
    if id(plan) not in traces:
        traces[id(plan)] = plan, CallTrace.of(costs, plan)
        if len(traces) > _MAX_TRACES:
            del traces[next(iter(traces))]
    trace: CallTrace = traces[id(plan)][1]
    return trace


def _summary(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    traces_of: Sequence[Mapping[str, CallTrace]],
    chunks: Sequence[ChunkCost],
    stages: Sequence[StageTime],
    memory: Sequence[StageMemory],
) -> Evaluation:
    names, micro_batches = candidate.mesh.names, candidate.micro_batches
    bottleneck = max(range(len(stages)), key=lambda index: stages[index].end_seconds)
    traces, stage = traces_of[bottleneck], stages[bottleneck]
    chunks_here = [chunks[index] for index in chunks_of_stages(candidate.pipeline)[bottleneck]]
    all_calls = Counter(call.block for call in graph.calls)
    own_calls = Counter(graph.calls[index].block for index in stage.calls)

    def total(of: Callable[[CallTrace], float], calls: Mapping[str, int]) -> float:
        return micro_batches * sum(count * of(traces[name]) for name, count in calls.items())

    def seconds(exposed: bool) -> Callable[[CallTrace], float]:
        return lambda trace: trace.seconds(backward=False, exposed=exposed) + trace.seconds(backward=True, exposed=exposed)

    flops, model_flops = total(lambda trace: trace.flops, all_calls), total(lambda trace: trace.model_flops, all_calls)
    axis_seconds = [total(lambda trace, axis=axis: trace.axis_seconds[axis], own_calls) for axis in range(len(names))]  # type: ignore[misc]
    redundant = [total(lambda trace, axis=axis: trace.redundant_flops[axis], all_calls) for axis in range(len(names))]  # type: ignore[misc]
    communication = [each for chunk in chunks_here for each in chunk.communication]
    axis_seconds[candidate.mesh.index(DATA_AXIS)] += sum(chunk.transfer_seconds for chunk in chunks_here)
    compute = total(seconds(exposed=False), own_calls) + micro_batches * sum(each.accumulate_seconds for each in communication)
    exposed = total(seconds(exposed=True), own_calls)
    in_stage = stage.busy_seconds + stage.tail_seconds
    per_device = model_flops / stage.end_seconds / candidate.devices if stage.end_seconds else 0.0
    return Evaluation(
        step_seconds=stage.end_seconds,
        compute_seconds=compute,
        exposed_seconds=exposed,
        stall_seconds=chunks_here[0].passes.stall_seconds if len(chunks) == 1 else max(0.0, in_stage - compute - exposed),
        bubble_seconds=stage.bubble_seconds,
        optimizer_seconds=stage.optimizer_seconds,
        axis_seconds=tuple(zip(names, axis_seconds, strict=True)),
        redundant_share=tuple((name, share / flops if flops else 0.0) for name, share in zip(names, redundant, strict=True)),
        model_flops=model_flops,
        tflops_per_device=per_device / 1e12,
        mfu=per_device / _mean_peak_flops_per_second(cluster, candidate),
        stages=tuple(stages),
        stage_memory=tuple(memory),
        host_stall_seconds=total(lambda trace: trace.stall_seconds(HOST_LINK), own_calls),
        launch_stall_seconds=total(lambda trace: trace.stall_seconds(LAUNCHES), own_calls),
        exposed_axis_seconds=tuple(
            (name, total(lambda trace, axis=axis: trace.exposed_axis_seconds[axis], own_calls))  # type: ignore[misc]
            for axis, name in enumerate(names)
        ),
    )


def _mean_peak_flops_per_second(cluster: Cluster, candidate: Candidate) -> float:
    """Return the mean peak of one device in the compute dtype, over the stages."""
    clusters = stage_clusters(cluster, candidate.pipeline.stages)
    return sum(each.device.matrix_peak_flops_per_second(candidate.precision.compute) for each in clusters) / len(clusters)


class SharedCosts:
    """The shared costs for `evaluate` of several candidates of one graph's blocks on one cluster. Nodes whose plans are one
    object in two candidates are priced once."""

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        self.graph, self.cluster = graph, cluster
        self._by_mesh: dict[tuple[Mesh, int, int], dict[str, BlockCosts]] = {}
        self._by_batch: dict[int, dict[str, BlockCosts]] = {}
        self._first: dict[str, BlockCosts] = {}

    def of(self, candidate: Candidate, cluster: Cluster | None = None) -> Mapping[str, BlockCosts]:
        """Return the costs by the names of the blocks; empty where stages have different devices. `cluster`: the part of the
        devices that the candidate is on, always the same for one mesh (else: a stage's)."""
        if len({group.device for group in self.cluster.groups}) > 1:
            return {}
        key = candidate.mesh, candidate.micro_batch, candidate.zero_group
        if key not in self._by_mesh:
            cluster = cluster or stage_cluster(self.cluster, candidate.pipeline.stages)
            self._by_mesh[key] = {
                block.name: BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster, candidate.zero_group)
                for block in self.graph.blocks
            }
            self._share(self._by_mesh[key], candidate.micro_batch)
        return self._by_mesh[key]

    def _share(self, costs: Mapping[str, BlockCosts], batch: int) -> None:
        same = self._by_batch.setdefault(batch, {})
        for name, each in costs.items():
            first = same.get(name) or self._first.get(name)
            if first is not None:
                each.share_with(first)
            same.setdefault(name, each)
            self._first.setdefault(name, each)
