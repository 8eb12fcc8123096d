"""A lower bound of a pipeline's step with its bubble and its micro-batches in flight, for every partition and every schedule that
the search looks at.

Stage s waits until the first micro-batch has gone forward through the chunks before it, and where the schedule ends with its
first chunk's backward, that gradient goes back through them afterwards. So with ``W_s`` for what the stage computes of one of
``m`` micro-batches, ``T >= m W_s + sum over j < s of (forward_j + backward_j)``. With one chunk a stage that is at least
``W / (1 - (1 - 1/m)^p)`` for all stages together, ``W`` being the sum of all W_s (where all p bounds are equal, each W_s is
``1 - 1/m`` times the one before); with several chunks, each has at least one call. Schedules of few chunks are looked at path by
path (`bubble_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.step.call_trace import weight_gradient_nodes
from autopar.solve.bounds.block_relaxation import BlockRelaxation
from autopar.solve.bounds.call_levels import CallLevels
from autopar.solve.bounds.memory_bound import PipelineShape, memory_bound
from autopar.solve.pipeline.bubble_bound import BubbleFactors, WorkShare
from autopar.solve.pipeline.in_flight_levels import ScheduleProfile, call_levels, schedule_profile
from autopar.solve.problem.problem import Problem, with_zero_group
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption

_FEW_CHUNKS = 2
"""With more chunks a stage, what each of them has at least says as much as the cutting planes."""


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """One call of a block for one micro-batch, by the fastest strategies: all of it, its forward, its backward, and of that the
    gradients of inputs, which no schedule delays."""

    both: float
    forward: float
    backward: float
    inputs: float

    def part(self, share: float) -> CallSeconds:
        """Of a share of the micro-batch."""
        return CallSeconds(self.both * share, self.forward * share, self.backward * share, self.inputs * share)


@dataclass(frozen=True, slots=True)
class StageRelaxation:
    """The blocks on the mesh of a stage, for micro-batches of one size. `flow_seconds` of one stage: below what its calls take in
    a step. `calls`: by block."""

    problem: Problem
    flow_seconds: float
    blocks: tuple[BlockRelaxation, ...]
    calls: Mapping[str, CallSeconds]
    bubbles: BubbleFactors

    def at_least(self, point: GridPoint, options: Sequence[ScheduleOption], best_seconds: float) -> float:
        """The step of `point` with each of `options`, or `best_seconds` where that is less; infinite where nothing fits."""
        problem = with_zero_group(self.problem, point.zero_group)
        least = self.under_any_schedule(point)
        if least >= best_seconds:
            return least
        bound = best_seconds
        for group in _alike(options):
            if bound <= least:
                break
            profiles = [schedule_profile(point.stages, each.virtual, each.schedule, point.micro_batches) for each in group]
            shape = self._shape(point, profiles[0])
            seconds = shape.factor * self.flow_seconds
            if seconds < bound and group[0].virtual <= _FEW_CHUNKS:
                seconds = max(seconds, self._with_bubble(point, group[0], bound))
            if seconds < bound:
                held_shape = replace(shape, calls=self._call_levels(point, profiles, best_seconds))
                held = memory_bound(problem, self.blocks, point.micro_batches, {1.0: self.flow_seconds}, held_shape)
                bound = min(bound, max(seconds, held))
        return max(least, bound)

    def under_any_schedule(self, point: GridPoint) -> float:
        """With one micro-batch in flight, and no bubble but the first calls."""
        problem = with_zero_group(self.problem, point.zero_group)
        shape = PipelineShape(point.stages, wait_seconds=self._waits(point.stages, drains=False))
        return memory_bound(problem, self.blocks, point.micro_batches, {1.0: self.flow_seconds}, shape)

    def _with_bubble(self, point: GridPoint, option: ScheduleOption, enough_seconds: float) -> float:
        """What the calls take in a step, and the bubble of one schedule; at most about `enough_seconds`."""
        graph = self.problem.graph
        whole = sum(graph.count(name) * each.both for name, each in self.calls.items())
        if not whole:
            return 0.0
        shares = []
        for name, each in self.calls.items():
            count = graph.count(name)
            alone = {graph.calls[0].block: 0, graph.calls[-1].block: -1}.get(name) if count == 1 else None
            part = count / whole
            shares.append(
                WorkShare(
                    part * each.both, part * each.forward, part * each.inputs, part * each.backward, alone, each.both / whole
                )
            )
        average = whole * point.micro_batches / point.stages
        return average * self.bubbles.factor(point.stages, option, point.micro_batches, tuple(shares), enough_seconds / average)

    def _shape(self, point: GridPoint, profile: ScheduleProfile) -> PipelineShape:
        many, stages = point.micro_batches, point.stages
        wait = self._waits(stages, drains=False)
        drain = self._waits(stages, drains=True) if profile.drains else 0.0
        factor = stages / many / (1 - (1 - 1 / many) ** stages) if profile.drains and profile.virtual == 1 else 1.0
        return PipelineShape(stages, wait, drain, max(1.0, factor))

    def _waits(self, stages: int, drains: bool) -> float:
        """On average over the stages: behind s others, the first s calls at least, forward or (`drains`) backward."""
        waits = [0.0]
        for call in self.problem.graph.calls[: stages - 1]:
            seconds = self.calls[call.block]
            waits.append(waits[-1] + (seconds.backward if drains else seconds.forward))
        return sum(waits) / len(waits)

    def _call_levels(self, point: GridPoint, profiles: Sequence[ScheduleProfile], best_seconds: float) -> CallLevels:
        """Of all calls, under any of the schedules, for steps that are not above `best_seconds`."""
        seconds = {name: each.both * point.micro_batches for name, each in self.calls.items()}
        return CallLevels(call_levels(profiles), min(each.virtual for each in profiles), seconds, best_seconds)


def _alike(options: Sequence[ScheduleOption]) -> list[list[ScheduleOption]]:
    """Those of many chunks a stage together, and first: they have the smallest bubbles."""
    groups: dict[object, list[ScheduleOption]] = {}
    for option in sorted(options, key=lambda each: each.bubble_passes):
        virtual = min(option.virtual, _FEW_CHUNKS + 1)
        groups.setdefault((option.schedule, virtual), []).append(option)
    return list(groups.values())


def call_seconds(problem: Problem, name: str, flow_seconds: float) -> CallSeconds:
    """`flow_seconds`: a bound of all calls of the block in a step."""
    table = problem.blocks[name]
    forward = backward = inputs = 0.0
    delayed = weight_gradient_nodes(table.block)
    for node, strategies in table.strategies.items():
        least = min(each.seconds.backward for each in strategies)
        forward += min(each.seconds.forward for each in strategies)
        backward += least
        inputs += least / 2 if node in delayed else least
    both = flow_seconds / problem.graph.count(name) / problem.micro_batches
    return CallSeconds(max(both, forward + backward), forward, backward, inputs)
