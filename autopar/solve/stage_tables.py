"""Seconds and bytes of every run of consecutive calls as a pipeline chunk, under every option of its blocks and every ZeRO stage.

These are estimates for the dynamic program (`cutting`): sums over calls, transfers hidden behind each call as far as they go. The
evaluator has the last word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Device
from autopar.cost_models.memory import call_kept
from autopar.cost_models.overlap import Overlap
from autopar.cost_models.sizes import held_by_user
from autopar.cost_models.stages import cut_bytes
from autopar.cost_models.state import StateCost, optimizer_named
from autopar.cost_models.trace import Run
from autopar.cost_models.traffic import Traffic
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.ir.stages import repeatable
from autopar.solve.cutting import Matrix
from autopar.solve.frontier import Options


class PerCall(NamedTuple):
    """One call. Seconds of a micro-batch (`once`), of its backward, of what of that can be put off; once a step: of its reduction
    where that is behind the last micro-batch, of the update; bytes of its state. Of all calls only the largest counts of
    `running` (bytes while it runs) and `exposed` (seconds of its reduction)."""

    once: float
    backward: float
    reduced: float
    update: float
    state: float
    running: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Setting:
    """A step: global batch, its micro-batches, ranks that share one copy of the state, precision, optimizer; and the hardware."""

    batch: int
    micro_batches: int
    shards: int
    precision: Precision
    optimizer: str
    device: Device
    overlap: Overlap


@dataclass(frozen=True, slots=True)
class Choices:
    """Of all runs of calls, per choice (an option and a ZeRO stage): ``[choice, first, behind]``. `load` are seconds of a step,
    `once` those of one micro-batch, `state` bytes that stay, `running` those while its largest call runs (all chunks of a stage
    take turns), `kept` those of each micro-batch in flight."""

    names: tuple[tuple[int, int], ...]
    load: Matrix
    once: Matrix
    state: Matrix
    running: Matrix
    kept: Matrix


@dataclass(frozen=True, slots=True)
class Chosen:
    """The least load that fits, and which choice that is: ``[first, behind]``."""

    load: Matrix
    once: Matrix
    choice: Any


@dataclass(frozen=True, slots=True)
class Runs:
    """Per option: one call of each block, and what every call of the graph keeps. `sent` are the bytes of a micro-batch over a
    cut before each call, without what inputs determine."""

    runs: tuple[Mapping[str, Run], ...]
    kept: tuple[Sequence[float], ...]
    sent: tuple[float, ...]

    @staticmethod
    def of(graph: Graph, options: Options, costs: Mapping[str, BlockCosts]) -> Runs:
        runs = tuple({name: Run.of(costs[name], plan) for name, plan in option.items()} for option in options)
        kept = tuple(call_kept(graph, {name: run.memory for name, run in each.items()}) for each in runs)
        able = repeatable(graph)
        return Runs(runs, kept, tuple(cut_bytes(graph, runs[0], cut, able) for cut in range(len(graph.calls))))


class StageTables:
    """`runs` are the blocks under each option, `costs` the blocks' prices on the mesh of one stage with its state group."""

    def __init__(
        self, graph: Graph, runs: Runs, costs: Mapping[str, BlockCosts], zeros: Sequence[int], setting: Setting
    ) -> None:
        self.graph, self.setting, self.kept, self.sent = graph, setting, runs.kept, runs.sent
        self.names = tuple((number, zero) for number in range(len(runs.runs)) for zero in zeros)
        self.inputs = held_by_user(graph, setting.batch, next(iter(costs.values())).mesh)
        states = {(name, zero): state_of(costs[name], run, zero, setting) for name, run in runs.runs[0].items() for zero in zeros}
        self.calls = [
            {name: per_call(run, states[name, zero], zero, setting) for name, run in runs.runs[number].items()}
            for number, zero in self.names
        ]

    def least_seconds(
        self, stages: int, virtual: int, held: float, room_bytes: float, waiting: float, sending: float
    ) -> float:
        """About the least step of so many equal stages of `virtual` equal chunks: the layers of the fullest one at least (chunks
        take turns, so a longer one holds up all), and `sending` for each micro-batch. Infinite where stages do not fit that hold
        `held` micro-batches on average."""
        counts = Counter(call.block for call in self.graph.calls)
        best = float("inf")
        for (number, _), calls in zip(self.names, self.calls, strict=True):
            state = sum(counts[name] * call.state for name, call in calls.items())
            running = min(call.running for call in calls.values())
            if (state + held * sum(self.kept[number])) / stages + self.inputs + running > room_bytes:
                continue
            once = sum(counts[name] * call.once for name, call in calls.items())
            update = sum(counts[name] * call.update for name, call in calls.items())
            chunks = stages * virtual
            layers = [name for name in calls if counts[name] >= chunks]
            fullest = virtual * max((-(-counts[name] // chunks) * calls[name].once for name in layers), default=0.0)
            load = max(once / stages, fullest)
            fill = waiting * (stages - 1) * once / stages
            best = min(best, self.setting.micro_batches * (load + sending) + fill + update / stages)
        return best

    def choices(self) -> Choices:
        """All matrices."""
        rows = [self._row(number, calls) for (number, _), calls in zip(self.names, self.calls, strict=True)]
        load, once, state, running, kept = (numpy.stack([row[index] for row in rows]) for index in range(5))
        return Choices(self.names, load, once, state, running, kept)

    def _row(self, number: int, per_block: Mapping[str, PerCall]) -> tuple[Matrix, Matrix, Matrix, Matrix, Matrix]:
        calls = [per_block[call.block] for call in self.graph.calls]
        columns = [list(column) for column in zip(*calls, strict=True)]
        once, backward, reduced, update, state = (_ranges(column) for column in columns[:5])
        running, exposed = (_largest(column) for column in columns[5:])
        with numpy.errstate(invalid="ignore"):
            load = self.setting.micro_batches * once + update + numpy.fmax(0.0, reduced - backward) + exposed
        return load, once, state, running + self.inputs, _ranges(self.kept[number])


def state_of(costs: BlockCosts, run: Run, zero: int, setting: Setting) -> StateCost:
    """Of all parameters of a block."""
    stored = list(zip(costs.block.parameters, run.plan.parameters, strict=True))
    return costs.state(stored, zero, setting.precision, optimizer_named(setting.optimizer))


def per_call(run: Run, cost: StateCost, zero: int, setting: Setting) -> PerCall:
    """One call of a block under a ZeRO stage."""
    many, slow = setting.micro_batches, setting.overlap.contention
    traffic = Traffic.of(cost, zero, setting.shards, setting.device, setting.precision, many)
    forward = sum(seconds for seconds, _ in run.forward)
    backward = sum(seconds for seconds, _ in run.backward) + traffic.accumulate_seconds
    behind = traffic.gather_backward + traffic.reduce_each
    ahead = max(forward + slow * traffic.gather_later, traffic.gather_later)
    back = max(backward + slow * behind, behind)
    memory = cost.memory
    state = memory.parameters + memory.optimizer + memory.buffers
    state += memory.accumulated if many > 1 else memory.gradients
    state += 0.0 if memory.gathered_is_transient else memory.gathered
    passing = memory.gathered if memory.gathered_is_transient else 0.0
    running = max(
        run.memory.made + 2 * passing,
        run.memory.working + 2 * passing + memory.reducing,
        run.memory.ending + memory.unreduced + memory.gradients + memory.reducing + passing,
    )
    reduced = cost.reduce_seconds if zero < 2 else 0.0
    return PerCall(
        ahead + back, back, reduced, traffic.optimizer_seconds, state, running, cost.reduce_seconds
    )


def _ranges(values: Sequence[float]) -> Matrix:
    """Sums of ``values[first:behind]``; infinite where that is empty."""
    sums = numpy.concatenate([[0.0], numpy.cumsum(values)])
    out = sums[None, :] - sums[:, None]
    out[numpy.tril_indices(len(sums))] = numpy.inf
    return out


def _largest(values: Sequence[float]) -> Matrix:
    """Maxima of ``values[first:behind]``."""
    count = len(values)
    out = numpy.zeros((count + 1, count + 1))
    for first in range(count):
        out[first, first + 1 :] = numpy.maximum.accumulate(values[first:])
    return out


def with_sends(of: Chosen, seconds: Sequence[float], micro_batches: int) -> Chosen:
    """`seconds` is a transfer over a cut before each call, forward or back. A link carries all micro-batches one after
    another."""
    once = numpy.array([*seconds, 0.0])[:, None]
    load = numpy.where(numpy.isfinite(of.load), numpy.maximum(of.load, micro_batches * once), numpy.inf)
    return Chosen(load, of.once + 2 * once, of.choice)


def chosen(of: Choices, held: float, room_bytes: float, allowed: Matrix, chunks: int = 1) -> Chosen:
    """Where `held` micro-batches are in flight and tensors of a stage of so many like chunks may take `room_bytes`; `allowed`
    says where chunks may begin and end."""
    fits = (chunks * (of.state + held * of.kept) + of.running <= room_bytes) & allowed
    load = numpy.where(fits, of.load, numpy.inf)
    choice = load.argmin(axis=0)
    picked = choice[None]
    return Chosen(numpy.take_along_axis(load, picked, 0)[0], numpy.take_along_axis(of.once, picked, 0)[0], choice)
