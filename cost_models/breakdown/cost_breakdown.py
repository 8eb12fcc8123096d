"""Every operation and collective of one pipeline stage with its seconds in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import StateCost
from autopar.cost_models.state.state_memory import optimizer_target
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import ChunkCost, chunk_costs
from autopar.cost_models.step.evaluate import stage_traces
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate, Conversion, NodePlan
from autopar.rules.conversions import COLLECTIVES
from autopar.schedules.pipeline_schedule import chunks_of_stages

PricedCollective = tuple[str, float, AxisLink]
"""Kind, bytes of the unsharded tensor, and the link: the arguments of `collective_seconds`."""


@dataclass(frozen=True, slots=True)
class OperationCost:
    """The cost of an operation of a distinct block, without communication inside it.

    times: its calls in a step (layers x micro-batches).
    seconds: of all of them: forward, backward and recomputation.
    recomputed_seconds: of these, the recomputation.
    """

    block: str
    plan: NodePlan
    times: int
    seconds: float
    recomputed_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StateCollective:
    """All-gathers of a block's weights, or the reduction of its gradients, under a ZeRO stage. `shared`: of the parameters that
    several calls share."""

    name: str
    zero: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective of a distinct block, overlapped or exposed.

    origin: the conversion, the operation that it is inside of, or the parameter state.
    kinds: of the collectives in forward and backward, where they are a conversion's.
    times, seconds: as in `OperationCost`.
    axis: mesh axis, by name.
    full_bytes: of the unsharded tensor (0: inside an operation).
    collectives: those of one call, where their seconds are known one by one.
    """

    block: str
    origin: Conversion | NodePlan | StateCollective
    times: int
    seconds: float
    axis: str
    kinds: tuple[str, ...] = ()
    full_bytes: float = 0.0
    collectives: tuple[PricedCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """The copies of one block's saved tensors to host memory and back, or of the optimizer's state (without a `block`),
    overlapped or exposed. `copied_bytes` are those of one copy, on one device.

    times, seconds: as in `OperationCost`.
    """

    block: str
    times: int
    copied_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CostBreakdown:
    """All operations and collectives of one pipeline stage in one step, the costliest first. `costs` are those of the blocks on
    its devices, `offloads` the copies to host memory and back.

    Operations and `other_seconds` (by what it is: compute of no operation) add up to the stage's compute; collectives of an axis
    add up to its `Evaluation.axis_seconds` where `stage` is the bottleneck.
    """

    stage: int
    operations: tuple[OperationCost, ...]
    collectives: tuple[CollectiveCost, ...]
    other_seconds: tuple[tuple[str, float], ...]
    costs: Mapping[str, BlockCosts]
    offloads: tuple[OffloadCost, ...] = ()


def cost_breakdown(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str, stage: int = 0) -> CostBreakdown:
    """Return the costs that `evaluate` adds up, of one pipeline stage."""
    traces_of = stage_traces(graph, candidate, cluster)
    all_chunks = chunk_costs(graph, candidate, cluster, traces_of, optimizer_named(optimizer))
    chunks = [all_chunks[index] for index in chunks_of_stages(candidate.pipeline)[stage]]
    counts = Counter(graph.calls[index].block for chunk in chunks for index in chunk.owned.calls)
    traces = traces_of[stage]
    costs = {name: trace.costs for name, trace in traces.items()}
    operations: list[OperationCost] = []
    collectives = list(_state_collectives(graph, candidate, chunks, costs))
    offloads = list(_optimizer_offload(candidate, cluster, chunks))
    converted = 0.0
    for name, trace in traces.items():
        if not counts[name]:
            continue
        times, repeats = counts[name] * candidate.micro_batches, trace.recompute.repeats
        operations += _operations(trace, times)
        collectives += _conversions(trace, times)
        if copied := sum(trace.recompute.offloaded.values()):
            offloads.append(OffloadCost(name, times, copied, times * sum(trace.costs.offload_seconds(copied))))
        collectives += _inside_operations(trace, times)
        converted += times * sum(
            cost.forward_local_seconds * (1 + (each in repeats)) + cost.backward_local_seconds
            for each in trace.plan.conversions
            for cost in [trace.costs.conversion(each.value, each.source, each.target)]
        )
    accumulated = sum(each.accumulate_seconds for chunk in chunks for each in chunk.communication) * candidate.micro_batches
    return CostBreakdown(
        stage=stage,
        operations=tuple(sorted(operations, key=lambda cost: -cost.seconds)),
        collectives=tuple(sorted((cost for cost in collectives if cost.seconds), key=lambda cost: -cost.seconds)),
        other_seconds=(("copies beside collectives", converted), ("accumulation of gradients", accumulated)),
        costs=costs,
        offloads=tuple(sorted(offloads, key=lambda cost: -cost.seconds)),
    )


def _optimizer_offload(candidate: Candidate, cluster: Cluster, chunks: Sequence[ChunkCost]) -> Iterator[OffloadCost]:
    """Yield the copies of the optimizer's state, read and written once a step where it lies elsewhere between steps."""
    target = optimizer_target(cluster, candidate.precision)
    copied = sum(each.memory.offloaded for chunk in chunks for each in (*chunk.owned.states, chunk.owned.root))
    if target is not None and copied:
        yield OffloadCost("", 1, copied, sum(target.copy_seconds(copied)))


def _operations(trace: CallTrace, times: int) -> Iterator[OperationCost]:
    for each in trace.plan.nodes:
        cost = trace.costs.node(each)
        again = cost.forward_seconds * (each.node in trace.recompute.repeats)
        seconds = cost.forward_seconds + cost.backward_seconds + again
        yield OperationCost(trace.plan.block, each, times, times * seconds, times * again)


def _conversions(trace: CallTrace, times: int) -> Iterator[CollectiveCost]:
    costs, repeats = trace.costs, trace.recompute.repeats
    for each in trace.plan.conversions:
        cost = costs.conversion(each.value, each.source, each.target)
        kinds = tuple(kind for kind in (cost.forward_kind, cost.backward_kind) if kind is not None and kind in COLLECTIVES)
        link = links_of_axis(costs.cluster, costs.mesh, cost.axis)
        yield CollectiveCost(
            block=trace.plan.block,
            origin=each,
            times=times,
            seconds=times * (cost.forward_comm_seconds * (1 + (each in repeats)) + cost.backward_comm_seconds),
            axis=costs.mesh.names[cost.axis],
            kinds=kinds,
            full_bytes=cost.full_bytes,
            collectives=tuple((kind, cost.full_bytes, link) for kind in kinds if kind),
        )


def _inside_operations(trace: CallTrace, times: int) -> Iterator[CollectiveCost]:
    costs, repeats = trace.costs, trace.recompute.repeats
    for each in trace.plan.nodes:
        cost = costs.node(each)
        for axis, forward, backward in zip(costs.mesh.names, cost.forward_comm_seconds, cost.backward_comm_seconds, strict=False):
            seconds = times * (forward * (1 + (each.node in repeats)) + backward)
            yield CollectiveCost(block=trace.plan.block, origin=each, times=times, seconds=seconds, axis=axis)


def _state_collectives(
    graph: Graph, candidate: Candidate, chunks: Sequence[ChunkCost], costs: Mapping[str, BlockCosts]
) -> Iterator[CollectiveCost]:
    """Yield the collectives of each block's own parameters, and of those that several calls share. Only ZeRO-3 gathers for each
    micro-batch; ZeRO-0 and 1 reduce once a step."""
    groups: Counter[tuple[str, StateCost, int, bool]] = Counter()
    for owned in (chunk.owned for chunk in chunks):
        blocks = [graph.calls[index].block for index in owned.calls]
        groups.update(
            (block, state, candidate.block(block).zero, False) for block, state in zip(blocks, owned.states, strict=True)
        )
        groups[blocks[0], owned.root, owned.root_zero, True] += 1
    for (block, state, zero, shared), count in groups.items():
        data, across = costs[block].state_links
        gathers: list[PricedCollective] = [("parameter_gather", state.gather_bytes, data)] * (2 if zero == 3 else 1)
        reductions: list[PricedCollective] = [("gradient_scatter" if zero else "all_reduce", state.reduce_bytes, data)]
        if across is not None:
            reductions.append(("all_reduce", state.reduce_bytes / (data.size if zero else 1), across))
        gather_seconds = state.gather_forward_seconds + state.gather_backward_seconds
        for name, each_micro_batch, seconds, collectives in (
            ("all-gather of weights", zero == 3, gather_seconds, gathers),
            (f"{'reduce-scatter' if zero else 'all-reduce'} of gradients", zero >= 2, state.reduce_seconds, reductions),
        ):
            times = count * (candidate.micro_batches if each_micro_batch else 1)
            is_sum = isclose(sum(collective_seconds(*each) for each in collectives), seconds, rel_tol=1e-9)
            yield CollectiveCost(
                block=block,
                origin=StateCollective(name, zero, shared),
                times=times,
                seconds=times * seconds,
                axis=DATA_AXIS,
                full_bytes=collectives[0][1],
                collectives=tuple(collectives) if is_sum else (),
            )
