"""Peak memory of every pipeline stage of a candidate, and the operation at which it occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.cost_models.events.memory_terms import CallMemory
from autopar.cost_models.hardware.allocator import NOT_TENSORS, communicator_count, fragmentation, process_bytes
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.state_memory import StateMemory, optimizer_target, update_temporaries
from autopar.cost_models.step.block_memory import call_saved_bytes
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import OwnedState
from autopar.cost_models.step.memory_events import (
    VARYING,
    MemoryEvent,
    PeakMemory,
    peak_memory,
)
from autopar.cost_models.step.pipeline_clock import chunks_in_flight
from autopar.cost_models.step.stage_devices import stage_clusters
from autopar.cost_models.tensors.sizes import user_held_bytes
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.schedules.pipeline_schedule import chunks_of_stages


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The peak of one stage.

    table: bytes by kind (`memory_events.KINDS`).
    phase, call, prefix: the event: ``backward`` of this call (its index and its place in the model), ...
    node, source: the operation, and its line in the user's code.
    capacity_bytes: memory of the stage's devices.
    budget_bytes: the part of it that the plan may take; the rest is the margin.
    host_fits: there is room for offloaded optimizer state where it lies.
    held_bytes: the most that stays between two calls of the program, which other models of the process have to leave to it.
    """

    table: dict[str, int]
    phase: str
    call: int
    prefix: str
    node: str
    source: str
    capacity_bytes: int = 0
    budget_bytes: int = 0
    host_fits: bool = True
    held_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The bytes that the device shows at the peak: reserved memory, context and communicators."""
        return sum(self.table.values())

    @property
    def reserved_bytes(self) -> int:
        """The bytes that the allocator reserves."""
        return self.peak_bytes - self.table["base"]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors alone (allocated): without the allocator's slack and the base."""
        return sum(size for kind, size in self.table.items() if kind not in NOT_TENSORS)

    @property
    def least_bytes(self) -> int:
        """The bytes that the stage cannot do without: with less it runs out of memory whatever the allocator gives back."""
        return self.peak_bytes - self.table["slack"]

    @property
    def place(self) -> str:
        """The place of the peak: ``backward of model.layers.31, at cross_entropy_sum (modeling_llama.py:500)``."""
        if self.phase == "optimizer":
            return "optimizer step"
        phase = {"reduction": "end of the backward", "gather": "start of the backward"}.get(self.phase, self.phase)
        where = f"{phase} of {self.prefix}"
        at = f", at {self.node}" if self.node else ""
        return where + at + (f" ({self.source})" if self.source else "")


def stage_memories(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    traces_of: Sequence[Mapping[str, CallTrace]],
    owned: Sequence[OwnedState],
) -> tuple[StageMemory, ...]:
    """Return the memory of each stage. `traces_of` are the blocks on each stage, `owned` the state of each model chunk."""
    devices = [each.device for each in stage_clusters(cluster, candidate.pipeline.stages)]
    target = optimizer_target(cluster, candidate.precision)
    out = []
    for each, device, traces in zip(stage_peaks(graph, candidate, cluster, traces_of, owned), devices, traces_of, strict=True):
        memory = _stage_memory(graph, traces, each.peak, each.calls)
        room = target is None or each.offloaded_bytes <= target.capacity_bytes
        budget, held = device.budget_bytes, round(each.peak.held_bytes)
        out.append(replace(memory, capacity_bytes=device.memory_bytes, budget_bytes=budget, host_fits=room, held_bytes=held))
    return tuple(out)


class StagePeak(NamedTuple):
    """The peak of a stage with all events of its step, its calls as indices into the graph, and the bytes that it offloads."""

    peak: PeakMemory
    calls: tuple[int, ...]
    offloaded_bytes: float


def stage_peaks(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    traces_of: Sequence[Mapping[str, CallTrace]],
    owned: Sequence[OwnedState],
) -> Iterator[StagePeak]:
    """Yield the peak of each stage (arguments as `stage_memories`)."""
    saved = call_saved_bytes(graph, {name: trace.memory for name, trace in traces_of[0].items()})
    pipeline = candidate.pipeline
    devices = [each.device for each in stage_clusters(cluster, pipeline.stages)]
    inputs_bytes = user_held_bytes(graph, candidate.batch, candidate.mesh)
    communicators = communicator_count(candidate.mesh, candidate.zero_group, pipeline.stages)
    for stage, chunks in enumerate(chunks_of_stages(pipeline)):
        states, device = [owned[chunk] for chunk in chunks], devices[stage]
        calls = _call_memories(graph, candidate, stage, traces_of[stage], states, saved)
        root = StateMemory.merged([each.root.memory for each in states])
        foreach = device.kind != "cpu"
        base, slack = process_bytes(device, communicators), fragmentation(device)
        peak = peak_memory(calls, root, base, foreach, candidate.micro_batches, inputs_bytes, slack)
        if pipeline.weight_versions > 1:
            peak = _with_second_weight_version(peak, calls, root, stage + 1 < pipeline.stages, foreach)
            peak.table["slack"] = slack * sum(peak.table[kind] for kind in VARYING)
            peak = replace(peak, held_bytes=sum(peak.table.values()) - base)
        offloaded = root.offloaded + sum(call.state.offloaded for call in calls)
        yield StagePeak(peak, tuple(index for each in states for index in each.calls), offloaded)


def _call_memories(
    graph: Graph,
    candidate: Candidate,
    stage: int,
    traces: Mapping[str, CallTrace],
    owned: Sequence[OwnedState],
    saved: Sequence[float],
) -> list[CallMemory]:
    """Return the calls of one stage, with the tensors of all its micro-batches in flight. `saved`: bytes of each call."""
    whole = [sum(saved[index] for index in each.calls) for each in owned]
    for_weights = [sum(traces[graph.calls[index].block].weight_gradient_bytes for index in each.calls) for each in owned]
    in_flight = chunks_in_flight(candidate.pipeline, stage, candidate.micro_batches, whole, for_weights)
    out = []
    for each, count in zip(owned, in_flight, strict=True):
        for index, state in zip(each.calls, each.states, strict=True):
            trace, one = traces[graph.calls[index].block], saved[index]
            out.append(
                CallMemory(
                    saved_bytes=one * count.whole + trace.weight_gradient_bytes * count.deferred,
                    forward_bytes=trace.memory.forward_bytes,
                    backward_bytes=trace.memory.backward_bytes,
                    input_gradient_bytes=trace.memory.input_gradient_bytes,
                    state=state.memory,
                    latest_saved_bytes=one,
                )
            )
    return out


def _with_second_weight_version(
    peak: PeakMemory, calls: Sequence[CallMemory], root: StateMemory, overlapping: bool, foreach: bool
) -> PeakMemory:
    """Add the gradients of the batch that has begun, and (`overlapping`: backwards of the batch before are left over) the weights
    that it was computed with. The optimizer steps while micro-batches are in flight."""
    states = [*(call.state for call in calls), root]
    table = dict(peak.table)
    table["parameters"] += sum(state.parameters for state in states) if overlapping else 0.0
    table["gradients"] += sum(state.gradients for state in states)
    update = dict(table, gathered=0.0, collectives=0.0, gradients=2 * sum(state.gradients for state in states))
    update["activations"] = sum(call.earlier for call in calls)
    update["temporaries"] = update_temporaries(states, foreach)
    if sum(update.values()) <= sum(table.values()):
        return replace(peak, table=table)
    return PeakMemory(MemoryEvent("optimizer", -1, *(update[kind] for kind in VARYING)), update)


def _stage_memory(graph: Graph, traces: Mapping[str, CallTrace], peak: PeakMemory, indices: Sequence[int]) -> StageMemory:
    """Return the peak with the names of its place. `indices` are the stage's calls in the graph."""
    table = {kind: round(size) for kind, size in peak.table.items()}
    event = peak.event
    if event.call < 0:
        return StageMemory(table=table, phase=event.phase, call=-1, prefix="", node="", source="")
    index = indices[event.call]
    call = graph.calls[index]
    trace = traces[call.block]
    node = trace.memory.peak_nodes[event.phase != "forward"] if event.phase in ("forward", "backward") else ""
    source = trace.costs.nodes[node].source if node else ""
    return StageMemory(
        table=table, phase=event.phase, call=index, prefix=call.prefix or call.block, node=node, source=source or ""
    )
