"""Seconds and bytes of every range of consecutive calls as a model chunk, under every option of its blocks and every ZeRO stage.

These are estimates for the dynamic program (`stage_partition`): sums over calls, with communication overlapped within each
call. The evaluator prices what is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

from autopar.cost_models.events.memory_terms import CallMemory, held_bytes
from autopar.cost_models.events.state_transfers import step_transfers, transfer_seconds
from autopar.cost_models.hardware.allocator import fragmentation
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import StateCommunication, StateCost
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import call_saved_bytes
from autopar.cost_models.step.call_trace import CallTrace, costs_as_run
from autopar.cost_models.step.memory_events import running_bytes
from autopar.cost_models.step.stage_devices import cut_bytes
from autopar.cost_models.tensors.sizes import user_held_bytes
from autopar.ir.graph import Graph
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.plan import Precision
from autopar.solve.bounds.memory_frontier import BlockOptions
from autopar.solve.pipeline.stage_partition import Matrix, best_partition


class CallCost(NamedTuple):
    """The cost of one call. Of each micro-batch: `pass_seconds`, of that `backward_seconds`, and of that the `weight_seconds`
    that a schedule may delay. Once a step: `reduce_seconds`
    (of gradients, where they are reduced after the last micro-batch) and `update_seconds` (optimizer). Of a chunk's calls only
    the largest counts for `running_bytes` (what it needs while it runs) and `exposed_seconds` (a reduction that nothing
    overlaps). Bytes are those that the allocator reserves."""

    pass_seconds: float
    backward_seconds: float
    weight_seconds: float
    reduce_seconds: float
    update_seconds: float
    state_bytes: float
    running_bytes: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class StageSetting:
    """The setting of a step: global batch, its micro-batches, precision, optimizer; and the hardware."""

    batch: int
    micro_batches: int
    precision: Precision
    optimizer: str
    device: Device
    overlap: Overlap


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """Costs by ``[choice, first, end]``: ``calls[first:end]`` as a chunk under each choice (an option of the blocks and a ZeRO
    stage, in `names`). `load_seconds` of a step, `pass_seconds` of one micro-batch, `state_bytes` of parameters, gradients and
    optimizer, `running_bytes` while its largest call runs (the chunks of a stage take turns), `saved_bytes` of each micro-batch
    in flight."""

    names: tuple[tuple[int, int], ...]
    load_seconds: Matrix
    pass_seconds: Matrix
    state_bytes: Matrix
    running_bytes: Matrix
    saved_bytes: Matrix


@dataclass(frozen=True, slots=True)
class BestRanges:
    """Best choices by ``[first, end]``: the least load that fits, and the number of its choice."""

    load_seconds: Matrix
    pass_seconds: Matrix
    choice: Any


@dataclass(frozen=True, slots=True)
class TracedOptions:
    """The traces of the blocks, per option: the trace of one call of each block, and what every call of the graph saves for its
    backward. `sent_bytes` are those of a micro-batch over a cut before each call, without values that every stage computes
    itself."""

    traces: tuple[Mapping[str, CallTrace], ...]
    saved_bytes: tuple[Sequence[float], ...]
    sent_bytes: tuple[float, ...]

    @staticmethod
    def of(graph: Graph, options: BlockOptions, costs: Mapping[str, BlockCosts]) -> TracedOptions:
        traced = tuple({name: CallTrace.of(costs[name], plan) for name, plan in option.items()} for option in options)
        repeated = repeatable_values(graph)
        sent = tuple(cut_bytes(graph, traced[0], cut, repeated) for cut in range(len(graph.calls)))
        return TracedOptions(traced, _saved_bytes(graph, traced), sent)

    def under_split_backward(self, graph: Graph) -> TracedOptions:
        """Return the traces of blocks as they run under a schedule that splits backwards."""
        traced = tuple({name: _under_split_backward(trace) for name, trace in option.items()} for option in self.traces)
        return replace(self, traces=traced, saved_bytes=_saved_bytes(graph, traced))


def _under_split_backward(trace: CallTrace) -> CallTrace:
    costs = costs_as_run(trace.costs, trace.plan, split_backward=True)
    return trace if costs is trace.costs else CallTrace.of(costs, trace.plan)


def _saved_bytes(graph: Graph, traced: Sequence[Mapping[str, CallTrace]]) -> tuple[Sequence[float], ...]:
    return tuple(call_saved_bytes(graph, {name: trace.memory for name, trace in each.items()}) for each in traced)


class StageTables:
    """Tables of one graph on the mesh of a stage: `traced` are the blocks under each option, `costs` the blocks' prices there
    with its ZeRO group."""

    def __init__(
        self, graph: Graph, traced: TracedOptions, costs: Mapping[str, BlockCosts], zeros: Sequence[int], setting: StageSetting
    ) -> None:
        self.graph, self.setting, self.saved, self.sent_bytes = graph, setting, traced.saved_bytes, traced.sent_bytes
        self.names = tuple((number, zero) for number in range(len(traced.traces)) for zero in zeros)
        self.held = 1 + fragmentation(setting.device)
        self.inputs = user_held_bytes(graph, setting.batch, next(iter(costs.values())).mesh)
        states = {
            (name, zero): block_state(costs[name], trace, zero, setting)
            for name, trace in traced.traces[0].items()
            for zero in zeros
        }
        self.calls = [
            {name: call_cost(trace, *states[name, zero], setting) for name, trace in traced.traces[number].items()}
            for number, zero in self.names
        ]

    def least_seconds(
        self, stages: int, virtual: int, in_flight: float, usable_bytes: float, bubble_passes: float, transfer_seconds: float
    ) -> float:
        """Return an estimate of the step with equal stages of `virtual` equal chunks: at least the layers of the fullest chunk
        (chunks take turns, so a longer one delays all), and `transfer_seconds` for each micro-batch. Calls may have different
        options (`stage_choices`). Infinite where stages do not fit that have `in_flight` micro-batches on average."""
        counts = Counter(call.block for call in self.graph.calls)
        by_zero: dict[int, list[tuple[float, float]]] = {}
        for (number, zero), calls in zip(self.names, self.calls, strict=True):
            state = sum(counts[name] * call.state_bytes for name, call in calls.items())
            running = min(call.running_bytes for call in calls.values())
            saved = self.held * in_flight * sum(self.saved[number])
            pass_seconds = sum(counts[name] * call.pass_seconds for name, call in calls.items())
            update = sum(counts[name] * call.update_seconds for name, call in calls.items())
            chunks = stages * virtual
            layers = [name for name in calls if counts[name] >= chunks]
            fullest = virtual * max((-(-counts[name] // chunks) * calls[name].pass_seconds for name in layers), default=0.0)
            load = max(pass_seconds / stages, fullest)
            fill = bubble_passes * (stages - 1) * pass_seconds / stages
            seconds = self.setting.micro_batches * (load + transfer_seconds) + fill + update / stages
            by_zero.setdefault(zero, []).append(((state + saved) / stages + self.inputs + running, seconds))
        return min(least_of_mixtures(points, usable_bytes) for points in by_zero.values())

    def range_options(self) -> RangeOptions:
        """Return the costs of all ranges of calls."""
        rows = [self._row(number, calls) for (number, _), calls in zip(self.names, self.calls, strict=True)]
        return RangeOptions(self.names, *map(numpy.stack, zip(*rows, strict=True)))

    def _row(self, number: int, per_block: Mapping[str, CallCost]) -> tuple[Matrix, Matrix, Matrix, Matrix, Matrix]:
        """Return the matrices of `RangeOptions` under one choice, in its order."""
        calls = [per_block[call.block] for call in self.graph.calls]
        columns = [list(column) for column in zip(*calls, strict=True)]
        pass_seconds, backward, _, reduced, update, state = (_ranges(column) for column in columns[:6])
        running, exposed = (_largest(column) for column in columns[6:])
        with numpy.errstate(invalid="ignore"):
            load = self.setting.micro_batches * pass_seconds + update + numpy.fmax(0.0, reduced - backward) + exposed
        return load, pass_seconds, state, running + self.inputs, _ranges([self.held * size for size in self.saved[number]])


def block_state(costs: BlockCosts, trace: CallTrace, zero: int, setting: StageSetting) -> tuple[StateCost, StateCommunication]:
    """Return the state cost of all parameters of a block, and its seconds in a step."""
    stored = list(zip(costs.block.parameters, trace.plan.parameters, strict=True))
    cost = costs.state_cost(stored, zero, setting.precision, optimizer_named(setting.optimizer))
    return cost, costs.state_communication(cost, zero, setting.precision, setting.micro_batches)


def call_cost(trace: CallTrace, cost: StateCost, communication: StateCommunication, setting: StageSetting) -> CallCost:
    """Price one call of a block whose state costs so much."""
    many, contention = setting.micro_batches, setting.overlap.contention
    forward = sum(seconds for seconds, _ in trace.forward)
    backward = sum(seconds for seconds, _ in trace.backward) + communication.accumulate_seconds
    order = step_transfers(setting.overlap, pipelined=True)
    forward_pass, backward_pass = (
        max(seconds + contention * beside.overlapped, beside.overlapped) + beside.exposed
        for seconds, beside in (
            (forward, transfer_seconds([(1, order.forward)], communication)),
            (backward, transfer_seconds([(1, order.backward)], communication)),
        )
    )
    held, memory, one = 1 + fragmentation(setting.device), cost.memory, trace.memory
    # with one micro-batch the gradients of every call are there at the end
    stays = held_bytes(memory, many > 1) + (memory.gradients if many == 1 else 0.0)
    call = CallMemory(0.0, one.forward_bytes, one.backward_bytes, one.input_gradient_bytes, memory)
    return CallCost(
        pass_seconds=forward_pass + backward_pass,
        backward_seconds=backward_pass,
        weight_seconds=min(trace.weight_gradient_seconds, backward_pass),
        reduce_seconds=communication.reduce_last - communication.reduce_each,
        update_seconds=communication.optimizer_seconds,
        state_bytes=memory.parameters + memory.optimizer + memory.buffers + held * stays,
        running_bytes=held * running_bytes(call, many > 1),
        exposed_seconds=communication.reduce_last,
    )


def least_of_mixtures(points: Sequence[tuple[float, float]], usable_bytes: float) -> float:
    """Return the least seconds within `usable_bytes` of mixtures of two options, given as (bytes, seconds): the lower convex hull
    there. Infinite where no option fits."""
    fit = [each for each in points if each[0] <= usable_bytes]
    best = min((seconds for _, seconds in fit), default=numpy.inf)
    for size, seconds in fit:
        for more, faster in points:
            if more > usable_bytes and faster < seconds:
                best = min(best, seconds + (usable_bytes - size) / (more - size) * (faster - seconds))
    return float(best)


def _ranges(values: Sequence[float]) -> Matrix:
    """Sums of ``values[first:end]``; infinite where that is empty."""
    sums = numpy.concatenate([[0.0], numpy.cumsum(values)])
    out = sums[None, :] - sums[:, None]
    out[numpy.tril_indices(len(sums))] = numpy.inf
    return out


def _largest(values: Sequence[float]) -> Matrix:
    """Maxima of ``values[first:end]``."""
    count = len(values)
    out = numpy.zeros((count + 1, count + 1))
    for first in range(count):
        out[first, first + 1 :] = numpy.maximum.accumulate(values[first:])
    return out


def with_sends(ranges: BestRanges, seconds: Sequence[float], micro_batches: int) -> BestRanges:
    """Add the transfers of chunks to their loads: `seconds` is a transfer over a cut before each call, forward or backward. A
    link carries all micro-batches one after another."""
    pass_seconds = numpy.array([*seconds, 0.0])[:, None]
    load = numpy.where(
        numpy.isfinite(ranges.load_seconds), numpy.maximum(ranges.load_seconds, micro_batches * pass_seconds), numpy.inf
    )
    return BestRanges(load, ranges.pass_seconds + 2 * pass_seconds, ranges.choice)


def best_ranges(options: RangeOptions, in_flight: float, usable_bytes: float, allowed: Matrix, chunks: int = 1) -> BestRanges:
    """The best choice of each range, with `in_flight` micro-batches, on a stage of so many like chunks with `usable_bytes`;
    `allowed` says where chunks may begin and end."""
    fits = (chunks * (options.state_bytes + in_flight * options.saved_bytes) + options.running_bytes <= usable_bytes) & allowed
    load = numpy.where(fits, options.load_seconds, numpy.inf)
    choice = load.argmin(axis=0)
    picked = choice[None]
    return BestRanges(
        numpy.take_along_axis(load, picked, 0)[0], numpy.take_along_axis(options.pass_seconds, picked, 0)[0], choice
    )


def spare_bytes(ranges: Sequence[tuple[RangeOptions, float, float]], allowed: Matrix, virtual: int) -> float | None:
    """Return what the fullest stage leaves free at most, by estimate (the dynamic program over bytes in place of seconds);
    negative where no partition fits. `ranges` has for each chunk its options, the micro-batches in flight and the usable bytes of
    its device. None where the calls cannot be cut so often."""
    most = max(usable for _, _, usable in ranges)
    loads_by_key: dict[tuple[int, float, float], Matrix] = {}
    for options, count, usable in ranges:
        key = id(options), count, usable
        if key not in loads_by_key:
            held = virtual * (options.state_bytes + count * options.saved_bytes) + options.running_bytes
            loads_by_key[key] = numpy.where(allowed, held.min(axis=0) + (most - usable), numpy.inf)
    loads = [loads_by_key[id(options), count, usable] for options, count, usable in ranges]
    cut = best_partition(loads, [numpy.zeros_like(load) for load in loads], 0.0, limits=1)
    if cut is None:
        return None
    fullest = max(float(load[first, end]) for load, (first, end) in zip(loads, pairwise(cut.edges), strict=True))
    return most - fullest
