"""A lower bound of a pipeline's step with its bubble and its micro-batches in flight, for every partition and every schedule that
the search looks at.

First for all schedules at once: a stage waits for the calls before it, and holds one micro-batch (`bounds.memory_bound`). Then
for each schedule by a linear program of its own (`schedule_bound`); the least of these is the bound of the point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_memory import backward_working_bytes
from autopar.ir.graph import Node
from autopar.solve.bounds.block_relaxation import BlockRelaxation, relax_blocks
from autopar.solve.bounds.call_lines import CallLines, duration_lines, saved_lines, traded_lines
from autopar.solve.bounds.call_state import call_states, undominated
from autopar.solve.bounds.cut_transfers import stage_transfers
from autopar.solve.bounds.memory_bound import PipelineShape, memory_bound
from autopar.solve.bounds.stage_calls import BlockCalls, StageLimits
from autopar.solve.pipeline.schedule_bound import ScheduleDetail, schedule_bound
from autopar.solve.problem.boundary import Slot
from autopar.solve.problem.problem import BlockTable, Problem, with_zero_group
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption

_MINOR_SHARE = 0.1
"""Blocks with less of all calls' seconds are looked at less closely."""

_NODES = 6
"""Operations of a block that are looked at: those with the largest tensors."""


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """The seconds of one call of a block for one micro-batch, by the fastest strategies: its forward, and all of it."""

    forward: float
    both: float

    def part(self, share: float) -> CallSeconds:
        """Return the seconds of a share of the micro-batch."""
        return CallSeconds(self.forward * share, self.both * share)


@dataclass(frozen=True, slots=True)
class RelaxedCalls:
    """All calls for micro-batches of one size. `flow_seconds` of one stage: below what its calls take in a step. `blocks`: what
    memory looks at; `calls`, `lines`: by block."""

    flow_seconds: float
    blocks: tuple[BlockRelaxation, ...]
    calls: Mapping[str, CallSeconds]
    lines: Mapping[str, CallLines] = field(default_factory=dict)

    def serves(self, detail: ScheduleDetail) -> bool:
        """Return whether it says all that a program of this detail takes: `traded` lines are for those that look closely."""
        return detail is ScheduleDetail.COARSE or all(each.traded is not None for each in self.lines.values())


@dataclass(frozen=True, slots=True)
class StageRelaxation:
    """The calls on the mesh of a stage; `cluster` is the whole one."""

    problem: Problem
    relaxed: RelaxedCalls
    cluster: Cluster

    def under_schedule(self, points: Sequence[GridPoint], option: ScheduleOption, detail: ScheduleDetail) -> float:
        """Return the least step of `points`, which differ in `zero_group` only, under one schedule; infinite where nothing
        fits."""
        point = points[0]
        calls, limits = self._program_inputs(points)
        return schedule_bound(point.stages, option, point.micro_batches, calls, limits, detail)

    def least_under_any_schedule(self, points: Sequence[GridPoint]) -> float:
        """Return the least bound of points that differ in `zero_group` only."""
        return min(map(self.under_any_schedule, points))

    def under_any_schedule(self, point: GridPoint) -> float:
        """Return a bound with one micro-batch in flight, and no bubble but the first calls."""
        problem = with_zero_group(self.problem, point.zero_group)
        shape = PipelineShape(point.stages, self._wait_seconds(point.stages))
        return memory_bound(problem, self.relaxed.blocks, point.micro_batches, self.relaxed.flow_seconds, shape)

    def _wait_seconds(self, stages: int) -> float:
        """Return the seconds that a stage waits, on average over the stages: behind s others, the first s calls at least."""
        waits = [0.0]
        for call in self.problem.graph.calls[: stages - 1]:
            waits.append(waits[-1] + self.relaxed.calls[call.block].forward)
        return sum(waits) / len(waits)

    def _program_inputs(self, points: Sequence[GridPoint]) -> tuple[tuple[BlockCalls, ...], StageLimits]:
        """Each call may have its state sharded as at any of the points."""
        problem, graph, micro_batches = self.problem, self.problem.graph, points[0].micro_batches
        device = problem.cluster.device
        ends = {graph.calls[0].block: 0, graph.calls[-1].block: -1}
        grouped = [with_zero_group(problem, point.zero_group) for point in points]
        calls = tuple(
            BlockCalls(
                count=graph.count(name),
                place=ends.get(name) if graph.count(name) == 1 else None,
                lines=lines,
                states=undominated(one for each in grouped for one in call_states(each, name, micro_batches).values()),
            )
            for name, lines in self.relaxed.lines.items()
        )
        communicators = min(communicator_count(problem.mesh, point.zero_group, point.stages) for point in points)
        limits = StageLimits(
            usable_bytes=tensor_budget_bytes(device, communicators) - problem.batch_bytes,
            held=1 + fragmentation(device),
            overlap=problem.cluster.overlap,
            transfers=stage_transfers(problem, self.cluster, points[0].stages),
        )
        return calls, limits


def operation_calls(problem: Problem, stages: int) -> RelaxedCalls:
    """Relax the calls by the fastest strategies of a point's own micro-batch alone, without linear programs."""
    calls = {name: call_seconds(problem, name, 0.0) for name in problem.blocks}
    return RelaxedCalls(_flow_seconds(problem, stages, calls), relax_blocks(problem), calls)


def relaxed_calls(
    problem: Problem, stages: int, blocks: tuple[BlockRelaxation, ...], seconds_left: Callable[[], float]
) -> RelaxedCalls:
    """Relax the calls by the tables of a point's own micro-batch."""
    shares = {name: problem.graph.count(name) * call_seconds(problem, name, 0.0).both for name in problem.blocks}
    minor = {name for name, seconds in shares.items() if seconds < _MINOR_SHARE * sum(shares.values())}
    lines = {each.name: _call_lines(problem, each, each.name in minor, seconds_left) for each in blocks}
    calls = {name: call_seconds(problem, name, each.durations[0].least_seconds) for name, each in lines.items()}
    return RelaxedCalls(_flow_seconds(problem, stages, calls), blocks, calls, lines)


def with_traded_lines(problem: Problem, relaxed: RelaxedCalls, seconds_left: Callable[[], float]) -> RelaxedCalls:
    """Return the calls with their traded lines, by far the largest programs of a block."""
    lines = dict(relaxed.lines)
    for block in relaxed.blocks:
        each = lines[block.name]
        if each.traded is None:
            traded = traded_lines(problem, block, each.durations[0].least_seconds, seconds_left())
            lines[block.name] = replace(each, traded=traded)
    return replace(relaxed, lines=lines)


def _call_lines(problem: Problem, block: BlockRelaxation, minor: bool, seconds_left: Callable[[], float]) -> CallLines:
    durations = duration_lines(problem, block.name, seconds_left(), minor)
    return CallLines(durations, saved_lines(block), least_working_bytes(problem, block.name), () if minor else None)


def _flow_seconds(problem: Problem, stages: int, calls: Mapping[str, CallSeconds]) -> float:
    """All calls of a step, on one of the stages on average."""
    return sum(problem.graph.count(name) * each.both for name, each in calls.items()) * problem.micro_batches / stages


def call_seconds(problem: Problem, name: str, least_seconds: float) -> CallSeconds:
    """Return the seconds of one call. `least_seconds`: what is known of one call and one micro-batch."""
    table = problem.blocks[name]
    forward = sum(min(each.seconds.forward for each in strategies) for strategies in table.strategies.values())
    return CallSeconds(forward, max(table.least_seconds, least_seconds))


def least_working_bytes(problem: Problem, name: str) -> float:
    """The largest working set of an operation's backward, under the strategy with the least, and the gradients of the block's
    inputs at their smallest placements (`block_memory`)."""
    table = problem.blocks[name]
    nodes = nlargest(_NODES, table.block.nodes, key=lambda node: _whole_bytes(table, node))
    return max(
        (min(backward_working_bytes(table.costs, each.plan) for each in table.strategies[node.name]) for node in nodes),
        default=0.0,
    ) + _least_input_gradients(problem, table)


def _whole_bytes(table: BlockTable, node: Node) -> float:
    profile = table.costs.profile(node.name)
    return sum(profile.operand_bytes) + sum(profile.result_bytes)


def _least_input_gradients(problem: Problem, table: BlockTable) -> float:
    out = 0.0
    for index, value in enumerate(table.block.inputs):
        number = problem.boundary.classes.get(Slot(table.block.name, "in", index))
        if value.differentiable and number is not None:
            out += min(table.costs.value_bytes(value.name, at) for at in problem.placements[number])
    return out
