"""The trace of a block's call as segments of the main stream, in order: compute and exposed communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.comm.conversion_costs import ConversionCost
from autopar.cost_models.compute.operations import Profile, work_shards
from autopar.cost_models.compute.overlapped_collectives import (
    StreamSegment,
    exposed_seconds,
    exposed_segments,
    weight_gradient_nodes,
)
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import BlockMemory, block_memory
from autopar.cost_models.step.product_overlap import product_overlaps
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.ir.partition_saved import chosen_tensors
from autopar.ir.plan import BlockPlan, Conversion, NodePlan
from autopar.operations.losses import runs_in_chunks

Segment = tuple[float, frozenset[str]]
"""Seconds of the main stream, and the physical links that it uses meanwhile (none: it computes)."""

NO_LINKS: frozenset[str] = frozenset()
HOST_LINK = frozenset(["host"])
LAUNCHES = frozenset(["launches"])


@dataclass(frozen=True, slots=True)
class CallTrace:
    """The trace of one call of a block on the main stream, and its totals.

    forward, backward: the segments. A backward begins with all that it recomputes, or gathers (of tensors saved in parts). Copies
        of offloaded tensors and launches of the host overlap with the call; where they take longer, a last segment is the stall.
    axis_seconds: communication on each mesh axis, overlapped or exposed.
    exposed_axis_seconds: the exposed part of it.
    model_flops, flops: without and with recomputation, over all devices of the mesh.
    redundant_flops: per mesh axis, those of operations that every rank of the axis repeats.
    weight_gradient_seconds: part of the backward that a schedule may delay (split backward).
    weight_gradient_bytes: tensors that live until the weight gradients are computed.
    """

    costs: BlockCosts
    plan: BlockPlan
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    recompute: RecomputePlan
    memory: BlockMemory
    axis_seconds: tuple[float, ...]
    model_flops: float
    flops: float
    redundant_flops: tuple[float, ...]
    weight_gradient_seconds: float = 0.0
    weight_gradient_bytes: float = 0.0
    exposed_axis_seconds: tuple[float, ...] = ()

    @staticmethod
    def of(costs: BlockCosts, plan: BlockPlan) -> CallTrace:
        """Trace a block. PlanError where the plan cannot be run (see `RecomputePlan.of`)."""
        recompute = RecomputePlan.of(costs, plan)
        recorder = _Recorder(costs, recompute.repeats)
        recorder.record(plan)
        recorder.partition(recompute)
        offload_seconds, load_seconds = costs.offload_seconds(sum(recompute.offloaded.values()))
        weight_gradient_seconds, weight_gradient_bytes = _weight_gradients(costs, plan)
        backward = [*exposed_segments(recorder.recompute), *exposed_segments(recorder.backward[::-1])]
        return CallTrace(
            costs=costs,
            plan=plan,
            forward=recorder.launched(_with_stall(exposed_segments(recorder.forward), offload_seconds, HOST_LINK), 0),
            backward=recorder.launched(_with_stall(backward, load_seconds, HOST_LINK), 1),
            recompute=recompute,
            memory=block_memory(costs, plan, recompute),
            axis_seconds=tuple(recorder.axis_seconds),
            model_flops=recorder.model_flops,
            flops=recorder.flops,
            redundant_flops=tuple(recorder.redundant_flops),
            weight_gradient_seconds=weight_gradient_seconds,
            weight_gradient_bytes=weight_gradient_bytes,
            exposed_axis_seconds=recorder.exposed_axis_seconds(),
        )

    def seconds(self, *, backward: bool, exposed: bool) -> float:
        """Return the seconds of compute, or of exposed communication."""
        return sum(seconds for seconds, links in (self.backward if backward else self.forward) if bool(links) == exposed)

    def stall_seconds(self, on: frozenset[str]) -> float:
        """The seconds, forward and backward, in which the device waits for copies of offloaded tensors (`HOST_LINK`), or for the
        host to launch kernels (`LAUNCHES`)."""
        return sum(seconds for seconds, links in (*self.forward, *self.backward) if links == on)


def costs_as_run(costs: BlockCosts, plan: BlockPlan, split_backward: bool) -> BlockCosts:
    """Return the costs of a block as it runs. Where products have the gradients of their weights later, those hide no collective;
    and the block is not compiled if it has to be one graph, since its plan says what is saved (`runtime.step.compiled_blocks`):
    such products are left out of graphs. Nor does torch split the backward of compiled blocks (pytorch/pytorch#161904)."""
    if not (split_backward and weight_gradient_nodes(costs.block)):
        return costs
    return costs.eager if plan.recompute or chosen_tensors(plan) else costs.with_delayed_weight_gradients


def _weight_gradients(costs: BlockCosts, plan: BlockPlan) -> tuple[float, float]:
    """Return (seconds, bytes) of the weight gradients of linears whose weight trains: they need the input and the gradient of the
    result."""
    delayed = weight_gradient_nodes(costs.block)
    seconds, tensors = 0.0, {}
    for each in plan.nodes:
        if each.node not in delayed or runs_in_chunks(each.function):
            continue
        node = costs.nodes[each.node]
        names = node.operands()
        seconds += costs.weight_gradient_seconds(each)
        tensors[names[0], each.operands[0]] = costs.value_bytes(names[0], each.operands[0])
        tensors[f"gradient of {node.name}", each.results[0]] = costs.value_bytes(node.name, each.results[0])
    return seconds, sum(tensors.values())


@dataclass(slots=True)
class _Recorder:
    """A recorder of segments in the order of the forward; `recompute` are those that the backward repeats first, `backward` is
    reversed when it is read."""

    costs: BlockCosts
    recomputed: frozenset[str | Conversion]
    axis_seconds: list[float] = field(init=False)
    redundant_flops: list[float] = field(init=False)
    forward: list[StreamSegment] = field(default_factory=list)
    recompute: list[StreamSegment] = field(default_factory=list)
    backward: list[StreamSegment] = field(default_factory=list)
    model_flops: float = 0.0
    flops: float = 0.0
    launches: list[int] = field(default_factory=lambda: [0, 0])
    plans: dict[str, NodePlan] = field(default_factory=dict)
    communications: list[tuple[list[StreamSegment], int, int, float]] = field(default_factory=list)
    """Each collective: its stream, its segment there, its mesh axis and seconds."""

    def __post_init__(self) -> None:
        axes = len(self.costs.mesh.sizes)
        self.axis_seconds, self.redundant_flops = [0.0] * axes, [0.0] * axes

    def record(self, plan: BlockPlan) -> None:
        """Record conversions of inputs and parameters, then each node with the conversions of its outputs."""
        conversions: dict[str, list[Conversion]] = {}
        for each in plan.conversions:
            conversions.setdefault(each.value, []).append(each)
        block = self.costs.block
        self.plans = {node_plan.node: node_plan for node_plan in plan.nodes}
        for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
            self.convert(conversions.get(value.name, ()))
        for node in block.nodes:
            self.compute(self.plans[node.name])
            for output in node.outputs:
                self.convert(conversions.get(output.name, ()))

    def compute(self, plan: NodePlan) -> None:
        cost, profile = self.costs.node(plan), self.costs.profile(plan.node)
        recomputed = plan.node in self.recomputed
        first, second = profile.launches
        self.launches[0] += first
        self.launches[1] += second + first * recomputed
        for stream in (self.forward, self.recompute)[: 1 + recomputed]:
            _append(stream, cost.forward_seconds, NO_LINKS)
            for axis, seconds in enumerate(cost.forward_comm_seconds):
                self._communicate(stream, axis, seconds, self._overlap_share_inside(profile, axis))
        for axis, seconds in enumerate(cost.backward_comm_seconds):
            self._communicate(self.backward, axis, seconds, self._overlap_share_inside(profile, axis))
        _append(self.backward, cost.backward_seconds, NO_LINKS)
        flops = (1 + recomputed) * profile.forward_flops + profile.backward_flops
        self.flops += flops
        self.model_flops += profile.model_flops
        for axis, shards in enumerate(work_shards(plan.operands, plan.results, self.costs.mesh.sizes)):
            if shards == 1 < self.costs.mesh.sizes[axis]:
                self.redundant_flops[axis] += flops

    def convert(self, conversions: Sequence[Conversion]) -> None:
        for each in conversions:
            cost = self.costs.conversion(each.value, each.source, each.target)
            first, second = cost.forward_comm_seconds > 0, cost.backward_comm_seconds > 0
            self.launches[0] += first
            self.launches[1] += second + first * (each in self.recomputed)
            for stream in (self.forward, self.recompute)[: 1 + (each in self.recomputed)]:
                # what is recomputed hides nothing by its price: which products are there too is not known to the integer program
                share = self._share_beside_products(each, cost, backward=False) if stream is self.forward else None
                self._communicate(stream, cost.axis, cost.forward_comm_seconds, share)
                _append(stream, cost.forward_local_seconds, NO_LINKS)
            _append(self.backward, cost.backward_local_seconds, NO_LINKS)
            share = self._share_beside_products(each, cost, backward=True)
            self._communicate(self.backward, cost.axis, cost.backward_comm_seconds, share)

    def partition(self, recompute: RecomputePlan) -> None:
        """Record tensors that are saved in parts: a copy in the forward, a gather in the backward."""
        for storage, axis in recompute.partitioned.items():
            copy, gather = self.costs.partition_seconds(axis, recompute.saved[storage])
            _append(self.forward, copy, NO_LINKS)
            self._communicate(self.recompute, axis, gather)

    def launched(self, stream: Sequence[Segment], backward: int) -> tuple[Segment, ...]:
        """Return the stream, and a stall where the host takes longer to launch its kernels than the device to run them."""
        seconds = self.launches[backward] * self.costs.cluster.device.host_launch_seconds
        return _with_stall(stream, seconds, LAUNCHES)

    def _overlap_share_inside(self, profile: Profile, axis: int) -> float:
        """Return the share that may overlap of the collectives inside a function. Beside all-to-alls of experts compute is slower
        by the contention (DeepEP takes 20 to 24 multiprocessors): so much of them is not hidden."""
        overlap = self.costs.cluster.overlap
        if profile.experts is not None:
            return 1.0 - overlap.contention if overlap.expert_dispatch else 0.0
        return self._overlap_share(axis)

    def _overlap_share(self, axis: int) -> float:
        """Return the share of a collective that may overlap with the compute next to it."""
        return 1.0 - 1.0 / self.costs.mesh.sizes[axis] if self.costs.cluster.overlap.model_parallel else 0.0

    def _share_beside_products(self, conversion: Conversion, cost: ConversionCost, *, backward: bool) -> float:
        """Return the share of a conversion's collective that may overlap with products (`product_overlap`): of one direction no
        two of them run beside the same collective."""
        share = self._overlap_share(cost.axis)
        seconds = cost.backward_comm_seconds if backward else cost.forward_comm_seconds
        if not seconds or share:
            return share
        overlaps = (each for each in product_overlaps(self.costs).get(conversion.value, ()) if each.backward == backward)
        return max((each.hidden_seconds(conversion, self.plans) for each in overlaps), default=0.0) / seconds

    def _communicate(self, stream: list[StreamSegment], axis: int, seconds: float, share: float | None = None) -> None:
        if seconds:
            self.axis_seconds[axis] += seconds
            links = links_of_axis(self.costs.cluster, self.costs.mesh, axis).names
            _append(stream, seconds, links, self._overlap_share(axis) if share is None else share)
            self.communications.append((stream, len(stream) - 1, axis, seconds))

    def exposed_axis_seconds(self) -> tuple[float, ...]:
        """Return the exposed communication of each axis; of a segment that several share, each has its part."""
        streams = self.forward, self.recompute, self.backward
        if not any(share for stream in streams for _, _, share in stream):
            return tuple(self.axis_seconds)
        out = [0.0] * len(self.axis_seconds)
        shares = {}
        for stream in streams:
            ordered = stream if stream is not self.backward else stream[::-1]
            exposed = exposed_seconds(ordered)
            left = exposed if stream is not self.backward else exposed[::-1]
            shares[id(stream)] = [kept / whole for kept, (whole, *_) in zip(left, stream, strict=True)]
        for stream, segment, axis, seconds in self.communications:
            out[axis] += seconds * shares[id(stream)][segment]
        return tuple(out)


def _append(stream: list[StreamSegment], seconds: float, links: frozenset[str], share: float = 0.0) -> None:
    if not seconds:
        return
    if stream and stream[-1][1:] == (links, share):
        stream[-1] = stream[-1][0] + seconds, links, share
    else:
        stream.append((seconds, links, share))


def _with_stall(stream: Sequence[Segment], other_seconds: float, link: frozenset[str]) -> tuple[Segment, ...]:
    """Return the stream, and a stall on `link` where what runs beside it there takes longer."""
    left = other_seconds - sum(seconds for seconds, _ in stream)
    return (*stream, (left, link)) if left > 0 else tuple(stream)
