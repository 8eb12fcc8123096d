"""The choices of all calls of a stage together, in the memory that a partition leaves free: each byte where it saves most
seconds.

The dynamic program of `stage_partition` takes one choice for all calls of a chunk, and the same for all chunks of a stage, so
that the next faster one seldom fits. Here each call takes its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.solve.pipeline.stage_cuts import PassSeconds
from autopar.solve.pipeline.stage_tables import CallCost, StageTables


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A partition of the calls into chunks: `edges` as in `StagePartition`, and the choice of each call, an option of the blocks
    and a ZeRO stage."""

    edges: tuple[int, ...]
    choices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice of one call: an option of its block and a ZeRO stage, with its seconds in a step, and its bytes."""

    choice: tuple[int, int]
    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class StageChoices:
    """The choices of all calls, by estimate. `tables`: of each stage. `stage_of`, `in_flight`: the stage of each chunk, and its
    micro-batches in flight."""

    tables: Sequence[StageTables]
    stage_of: Sequence[int]
    in_flight: Sequence[float]

    def fastest(self, edges: Sequence[int], zeros: Sequence[int], budget_bytes: Sequence[float]) -> StagePlan | None:
        """Return the fastest choices under the ZeRO stages `zeros` of all calls within the budget of each stage; None where even
        the smallest take more."""
        choices = [(0, 0)] * len(zeros)
        for stage, left in enumerate(budget_bytes):
            steps: list[tuple[float, int, int, _Choice, float]] = []
            for place, count, call in self._calls(edges, stage):
                every = _choices(self.tables[stage], call, count)
                hull = _convex_hull([each for each in every if each.choice[1] == zeros[call]])
                left -= hull[0].bytes
                choices[call] = hull[0].choice
                for one, other in pairwise(hull):
                    more = other.bytes - one.bytes
                    steps.append(((one.seconds - other.seconds) / more, place, call, other, more))
            if left < 0:
                return None
            full = set[int]()
            # the steps of one call are in this order too, since its choices are convex; of equal ones each chunk takes one in
            # turn, since a chunk that takes longer than others delays all stages
            for *_, call, other, more in sorted(steps, key=lambda step: (-step[0], step[1])):
                if more > left or call in full:
                    full.add(call)
                    continue
                left -= more
                choices[call] = other.choice
        return StagePlan(tuple(edges), tuple(choices))

    def stage_bytes(self, plan: StagePlan) -> list[float]:
        """Return the bytes of the calls of each stage."""
        return [sum(each.bytes for each in self._chosen(plan, stage)) for stage in range(len(self.tables))]

    def busiest_seconds(self, plan: StagePlan) -> float:
        """Return the seconds in a step of the calls of the stage that has most to compute."""
        return max(sum(each.seconds for each in self._chosen(plan, stage)) for stage in range(len(self.tables)))

    def call_seconds(self, plan: StagePlan) -> list[PassSeconds]:
        """Return the seconds of each call."""
        out = []
        for stage, tables in enumerate(self.tables):
            calls, many = dict(zip(tables.names, tables.calls, strict=True)), tables.setting.micro_batches
            for _, _, call in self._calls(plan.edges, stage):
                cost = calls[plan.choices[call]][tables.graph.calls[call].block]
                forward = cost.pass_seconds - cost.backward_seconds
                seconds = PassSeconds(_step_seconds(cost, many), forward, cost.backward_seconds, cost.weight_seconds)
                out.append((call, seconds))
        return [seconds for _, seconds in sorted(out)]

    def _calls(self, edges: Sequence[int], stage: int) -> Iterator[tuple[int, float, int]]:
        """Yield the calls of a stage: the place in its chunk, the micro-batches in flight there, and the call."""
        for (first, end), at, count in zip(pairwise(edges), self.stage_of, self.in_flight, strict=True):
            yield from ((call - first, count, call) for call in range(first, end) if at == stage)

    def _chosen(self, plan: StagePlan, stage: int) -> Iterator[_Choice]:
        for _, count, call in self._calls(plan.edges, stage):
            every = _choices(self.tables[stage], call, count)
            yield next(each for each in every if each.choice == plan.choices[call])


def _choices(tables: StageTables, call: int, in_flight: float) -> list[_Choice]:
    """Return all choices of a call."""
    block, many = tables.graph.calls[call].block, tables.setting.micro_batches
    out = []
    for choice, calls in zip(tables.names, tables.calls, strict=True):
        cost, saved = calls[block], tables.saved[choice[0]][call]
        out.append(_Choice(choice, _step_seconds(cost, many), cost.state_bytes + tables.held * in_flight * saved))
    return out


def _step_seconds(cost: CallCost, micro_batches: int) -> float:
    """Return the seconds of a call in a step."""
    reduced = max(0.0, cost.reduce_seconds - cost.backward_seconds)
    return micro_batches * cost.pass_seconds + cost.update_seconds + reduced


def _convex_hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Return the choices on the convex frontier of seconds and bytes, that with the fewest bytes first."""
    hull: list[_Choice] = []
    for each in sorted(choices, key=lambda each: (each.bytes, each.seconds)):
        if hull and each.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], each):
            hull.pop()
        hull.append(each)
    return hull


def _slope(one: _Choice, other: _Choice) -> float:
    """Return the seconds that a byte saves from one choice to another."""
    return (one.seconds - other.seconds) / (other.bytes - one.bytes)
