"""Every model chunk of a candidate: the parameter state that it owns, its clock per micro-batch, and its p2p sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.events.state_transfers import StepTransfers, step_transfers, transfer_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import AxisLink
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.state.optimizers import Optimizer
from autopar.cost_models.state.state_cost import StateCommunication, StateCost
from autopar.cost_models.step.call_trace import NO_LINKS, CallTrace
from autopar.cost_models.step.micro_batch_clock import CallSegments, StepPasses, simulate_step
from autopar.cost_models.step.stage_devices import send_seconds, stage_clusters, stage_link
from autopar.ir.graph import Graph, Parameter
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.pipeline.stage_values import BlockSlice, joined_slices, repeatable_values
from autopar.ir.placement import Placements
from autopar.ir.plan import Candidate
from autopar.schedules.pipeline_schedule import stage_of_chunks


@dataclass(frozen=True, slots=True)
class OwnedState:
    """The parameter state of some consecutive calls.

    states: per call, of the parameters that it alone uses.
    root: of the parameters that several calls share. They are one group, gathered before the first call, not resharded, and
        reduced after the last (FSDP2's root module), under ZeRO stage `root_zero`.
    """

    calls: tuple[int, ...]
    states: tuple[StateCost, ...]
    root: StateCost
    root_zero: int


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """The cost of a model chunk.

    communication: of each call's own parameters, and of the shared ones.
    transfer_seconds: of all communication on the data axis in a step, overlapped or exposed.
    send_seconds: one transfer to the next chunk; its gradient comes back in the same time.
    weight_gradient_seconds: part of a backward that the schedule may delay.
    exposed_seconds: of the model axes' communication in a forward and in a backward.
    """

    owned: OwnedState
    passes: StepPasses
    communication: tuple[StateCommunication, ...]
    transfer_seconds: float
    send_seconds: float
    weight_gradient_seconds: float = 0.0
    exposed_seconds: tuple[float, float] = (0.0, 0.0)


def owned_state(
    calls: Sequence[int], graph: Graph, candidate: Candidate, traces: Mapping[str, CallTrace], optimizer: Optimizer
) -> OwnedState:
    """Return the parameter state of these calls."""
    chosen = [graph.calls[index] for index in calls]
    users = Counter(name for call in chosen for name in set(call.parameters))
    shared: dict[str, tuple[Parameter, Placements]] = {}
    shared_zero = 0
    memo: dict[tuple[str, tuple[bool, ...]], StateCost] = {}
    states = []
    for call in chosen:
        trace = traces[call.block]
        own = tuple(users[name] == 1 for name in call.parameters)
        stored = list(zip(trace.costs.block.parameters, trace.plan.parameters, strict=True))
        if not all(own):
            shared.update((name, pair) for name, pair in zip(call.parameters, stored, strict=True) if users[name] > 1)
            shared_zero = max(shared_zero, min(2, trace.plan.zero))
        key = call.block, own
        if key not in memo:
            pairs = [pair for pair, is_own in zip(stored, own, strict=True) if is_own]
            memo[key] = trace.costs.state_cost(pairs, trace.plan.zero, candidate.precision, optimizer)
        states.append(memo[key])
    any_trace = next(iter(traces.values()))
    root = any_trace.costs.state_cost(shared.values(), shared_zero, candidate.precision, optimizer)
    return OwnedState(tuple(calls), tuple(states), root, shared_zero)


def chunk_costs(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    traces_of: Sequence[Mapping[str, CallTrace]],
    optimizer: Optimizer,
    record: bool = False,
) -> tuple[ChunkCost, ...]:
    """Return every model chunk of the pipeline, in the model's order. `cluster` is the whole one, `traces_of` are the blocks on
    each stage; with `record` the passes have what their streams do."""
    pipeline, mesh = candidate.pipeline, candidate.mesh
    clusters = stage_clusters(cluster, pipeline.stages)
    data_links = [links_of_axis(each, mesh, mesh.index(DATA_AXIS)) for each in clusters]
    chunks, stages = chunk_calls(graph, pipeline), stage_of_chunks(pipeline)
    sends, on_data_links = _sends(graph, candidate, cluster, traces_of, data_links[0])
    producers = repeatable_values(graph) if pipeline.repeated else {}
    out = []
    for chunk, (calls, sent) in enumerate(zip(chunks, sends, strict=True)):
        stage = stages[chunk]
        traces, data = traces_of[stage], data_links[stage]
        owned = owned_state(calls, graph, candidate, traces, optimizer)
        runs = [traces[graph.calls[index].block] for index in calls]
        communication = _communication(owned, runs, candidate, data, clusters[stage])
        segments = [CallSegments(trace.forward, trace.backward, each) for trace, each in zip(runs, communication, strict=False)]
        if repeated := _repeated_seconds(graph, pipeline.repeated, producers, calls, traces):
            segments[0] = replace(segments[0], forward=((repeated, NO_LINKS), *segments[0].forward))
        passes = simulate_step(
            segments,
            communication[-1],
            data.names,
            candidate.micro_batches,
            pipelined=len(chunks) > 1,
            overlap=cluster.overlap,
            sent_seconds=max(on_data_links[chunk : chunk + 2]),
            record=record,
        )
        weights = sum(trace.weight_gradient_seconds for trace in runs)
        forward, backward = (sum(trace.seconds(backward=each, exposed=True) for trace in runs) for each in (False, True))
        moved = _transfer_seconds(communication, step_transfers(cluster.overlap, len(chunks) > 1), candidate.micro_batches)
        out.append(ChunkCost(owned, passes, communication, moved, sent, weights, (forward, backward)))
    return tuple(out)


def _transfer_seconds(communication: Sequence[StateCommunication], order: StepTransfers, micro_batches: int) -> float:
    """Return the seconds of all transfers of a chunk's calls and of its root, as the tables of `breakdown` count them: with those
    of the calls at its ends, whose weights are still gathered."""
    passes = list(order.counted(micro_batches))
    return sum(transfer_seconds(passes, each).sent for each in communication)


def _communication(
    owned: OwnedState, traces: Sequence[CallTrace], candidate: Candidate, data: AxisLink, cluster: Cluster
) -> tuple[StateCommunication, ...]:
    """Return the communication of each call's own parameters, and of the shared ones."""
    pairs = [(state, trace.plan.zero) for state, trace in zip(owned.states, traces, strict=True)]
    shards = candidate.zero_group or data.size
    return tuple(
        StateCommunication.of(state, zero, shards, cluster.device, candidate.precision, candidate.micro_batches)
        for state, zero in [*pairs, (owned.root, owned.root_zero)]
    )


def _sends(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    traces_of: Sequence[Mapping[str, CallTrace]],
    data: AxisLink,
) -> tuple[list[float], list[float]]:
    """Return (seconds of each chunk's send to the next; those on links of the data axis, with a zero at both ends)."""
    pipeline, chunks, stages = candidate.pipeline, chunk_calls(graph, candidate.pipeline), stage_of_chunks(candidate.pipeline)
    sends, on_data_links = [], [0.0]
    for (stage, after), calls in zip(zip(stages, stages[1:], strict=False), chunks[1:], strict=True):
        link = stage_link(cluster, candidate.mesh.size, stage, after)
        sent = send_seconds(graph, traces_of[stage], calls[0], pipeline.repeated, link) if stage != after else 0.0
        sends.append(sent)
        on_data_links.append(sent if data.shares(link) else 0.0)
    return [*sends, 0.0], [*on_data_links, 0.0]


def _repeated_seconds(
    graph: Graph,
    repeated: Collection[str],
    producers: Mapping[str, Sequence[BlockSlice]],
    calls: Sequence[int],
    traces: Mapping[str, CallTrace],
) -> float:
    """Return the seconds that a chunk of these calls spends on values that it computes itself instead of receiving them: other
    chunks' nodes, forward only."""
    read = {name for index in calls for name in graph.calls[index].inputs}
    outputs = {name for index in calls for name in graph.calls[index].outputs}
    slices = joined_slices(graph, [producers[name] for name in repeated if name in read and name not in outputs])
    return sum(slice_forward_seconds(graph, each, traces) for each in slices if each.call not in calls)


def slice_forward_seconds(graph: Graph, block_slice: BlockSlice, traces: Mapping[str, CallTrace]) -> float:
    """Return the seconds of one forward of some nodes of a call."""
    trace = traces[graph.calls[block_slice.call].block]
    plans = {plan.node: plan for plan in trace.plan.nodes}
    return sum(trace.costs.node(plans[name]).forward_seconds for name in block_slice.nodes)
