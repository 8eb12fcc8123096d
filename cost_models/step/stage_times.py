"""The end of each pipeline stage in a step: chunks on the schedule's clock, reductions that are left over, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.state_group import state_group
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import ChunkCost
from autopar.cost_models.step.pipeline_clock import run_schedule
from autopar.cost_models.step.stage_devices import link_among_stages
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.schedules.clock import ChunkSeconds, RankSeconds
from autopar.schedules.pipeline_schedule import chunks_of_stages, stage_of_chunks


@dataclass(frozen=True, slots=True)
class StageTime:
    """The time of a pipeline stage. `end_seconds` is the sum of the other four.

    calls: of its chunks, as indices into the graph.
    busy_seconds: forwards and backwards, with stalls inside them (and sends, where they block).
    bubble_seconds: it waits for other stages.
    tail_seconds: it waits for the data axis after its last backward.
    """

    calls: tuple[int, ...]
    busy_seconds: float
    bubble_seconds: float
    tail_seconds: float
    optimizer_seconds: float
    end_seconds: float


class ScheduleTimes(NamedTuple):
    """The times that a schedule's clock runs with (`schedules.clock.Clock.run`).

    transfer_seconds: between each chunk and the next.
    blocking: a stage stalls while it sends.
    waits: of `chunks`, exposed communication.
    """

    chunks: tuple[ChunkSeconds, ...]
    transfer_seconds: tuple[float, ...]
    blocking: bool
    waits: tuple[ChunkSeconds, ...]


def schedule_times(costs: Sequence[ChunkCost], cluster: Cluster) -> ScheduleTimes:
    """Return the times of a pipeline's chunks. Weights that are gathered once arrive while a stage waits for its first
    micro-batch anyway."""
    chunks, waits, before = [], [], 0.0
    for cost in costs:
        passes = cost.passes
        first = passes.first_forward.seconds
        if not any(each.gather_each for each in cost.communication):
            first -= min(before, passes.first_forward.stall_seconds)
        before += first + cost.send_seconds
        last = passes.last_backward.seconds - passes.last_backward.tail_seconds
        weight = min(cost.weight_gradient_seconds, passes.backward.seconds)
        chunks.append(ChunkSeconds(passes.forward.seconds, passes.backward.seconds, first, last, weight_backward=weight))
        forward, backward = cost.exposed_seconds
        stalls = passes.first_forward.stall_seconds, passes.last_backward.stall_seconds - passes.last_backward.tail_seconds
        waits.append(ChunkSeconds(forward, backward, forward + stalls[0], backward + stalls[1], weight_backward=0.0))
    sends = tuple(cost.send_seconds for cost in costs[:-1])
    return ScheduleTimes(tuple(chunks), sends, cluster.overlap.blocking_sends, tuple(waits))


def stage_times(
    graph: Graph, candidate: Candidate, cluster: Cluster, traces_of: Sequence[Mapping[str, CallTrace]], costs: Sequence[ChunkCost]
) -> tuple[StageTime, ...]:
    """Return the time of each stage. `traces_of` are the blocks on each stage, `costs` all chunks in the model's order."""
    if len(costs) == 1:
        return (_only_stage(costs[0]),)
    times = schedule_times(costs, cluster)
    shared = cluster.device.ranks_per_core
    clocks = run_schedule(candidate.pipeline, candidate.micro_batches, *times, ranks_per_core=shared)
    tied_seconds = _tied_gradient_seconds(graph, candidate, cluster, traces_of[0], costs)
    chunks = chunks_of_stages(candidate.pipeline)
    return tuple(
        _stage_time([costs[chunk] for chunk in chunks[stage]], clock, tied_seconds.get(stage, 0.0))
        for stage, clock in enumerate(clocks)
    )


def _only_stage(cost: ChunkCost) -> StageTime:
    """Return the time of the only stage."""
    tail = cost.passes.last_backward.tail_seconds
    busy = cost.passes.forward_seconds + cost.passes.backward_seconds - tail
    optimizer = sum(each.optimizer_seconds for each in cost.communication)
    return StageTime(
        calls=cost.owned.calls,
        busy_seconds=busy,
        bubble_seconds=0.0,
        tail_seconds=tail,
        optimizer_seconds=optimizer,
        end_seconds=busy + tail + optimizer,
    )


def _stage_time(costs: Sequence[ChunkCost], clock: RankSeconds, tied_seconds: float) -> StageTime:
    """Return the time of a stage. `costs` are the stage's chunks. Their last backwards run from the last chunk to the first; the
    last reduction of one overlaps with the backward of the next."""
    tail = 0.0
    for cost in reversed(costs):
        last = cost.passes.last_backward
        overlapping = last.seconds - last.stall_seconds
        tail = max(0.0, tail - overlapping) + last.tail_seconds
    tail += tied_seconds
    optimizer = sum(each.optimizer_seconds for cost in costs for each in cost.communication)
    return StageTime(
        calls=tuple(index for cost in costs for index in cost.owned.calls),
        busy_seconds=clock.busy_seconds,
        bubble_seconds=clock.bubble_seconds,
        tail_seconds=tail,
        optimizer_seconds=optimizer,
        end_seconds=clock.end_seconds + tail + optimizer,
    )


def _tied_gradient_seconds(
    graph: Graph, candidate: Candidate, cluster: Cluster, traces: Mapping[str, CallTrace], costs: Sequence[ChunkCost]
) -> dict[int, float]:
    """Return the seconds of tied gradients per stage: parameters that calls of several stages share have a copy on each; their
    gradients are all-reduced at the end."""
    mesh, stages = candidate.mesh, stage_of_chunks(candidate.pipeline)
    users: dict[str, set[int]] = {}
    sizes: dict[str, float] = {}
    for chunk, cost in enumerate(costs):
        for call in (graph.calls[index] for index in cost.owned.calls):
            trace = traces[call.block]
            for name, parameter, at in zip(call.parameters, trace.costs.block.parameters, trace.plan.parameters, strict=True):
                users.setdefault(name, set()).add(stages[chunk])
                shards = (candidate.zero_group or mesh.size_of(DATA_AXIS)) if trace.plan.zero else 1
                group = state_group([(parameter, at)], mesh, candidate.precision)
                sizes[name] = group.trainable * itemsize(candidate.precision.master) / shards
    out: dict[int, float] = {}
    for name, on_stages in users.items():
        if len(on_stages) > 1 and sizes[name]:
            link = link_among_stages(cluster, mesh.size, cluster.links[-1], len(on_stages))
            seconds = collective_seconds("all_reduce", sizes[name], link)
            for stage in on_stages:
                out[stage] = out.get(stage, 0.0) + seconds
    return out
