"""Memory that a partition leaves free, spent on less recomputation: call by call, where a byte saves most seconds.

The dynamic program of `stage_partition` takes one option of the blocks for all calls of a chunk, and the same for all chunks of a
stage, so that the next option with less recomputation seldom fits. Here each call takes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.solve.pipeline.stage_tables import StageTables


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A partition of the calls into chunks: `edges` as in `StagePartition`, and the choice of each call, an option of the blocks
    and a ZeRO stage."""

    edges: tuple[int, ...]
    choices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """One call with the next option on its convex frontier of seconds and bytes: what it gains, and what it takes more."""

    call: int
    option: int
    seconds: float
    bytes: float


def with_spare_bytes(
    plan: StagePlan,
    tables: Sequence[StageTables],
    stage_of: Sequence[int],
    in_flight: Sequence[float],
    spare: Sequence[float],
) -> StagePlan:
    """Return the plan with as little recomputation as `spare` bytes of each stage allow by estimate. `tables`: of each stage.
    `stage_of`, `in_flight`: the stage of each chunk, and its micro-batches in flight."""
    choices = list(plan.choices)
    for stage, left in enumerate(spare):
        steps = [
            step
            for (first, end), at, count in zip(pairwise(plan.edges), stage_of, in_flight, strict=True)
            if at == stage
            for call in range(first, end)
            for step in _frontier_steps(tables[stage], call, *choices[call], count)
        ]
        # the steps of one call are in this order too, since its frontier is convex
        for step in sorted(steps, key=lambda each: -each.seconds / each.bytes):
            if step.bytes > left:
                break
            left -= step.bytes
            choices[step.call] = step.option, choices[step.call][1]
    return StagePlan(plan.edges, tuple(choices))


def pass_seconds(plan: StagePlan, tables: Sequence[StageTables], stage_of: Sequence[int]) -> list[float]:
    """Return the seconds of one micro-batch through each stage, by the tables."""
    out = [0.0] * len(tables)
    for (first, end), stage in zip(pairwise(plan.edges), stage_of, strict=True):
        costs = dict(zip(tables[stage].names, tables[stage].calls, strict=True))
        out[stage] += sum(
            costs[plan.choices[call]][tables[stage].graph.calls[call].block].pass_seconds for call in range(first, end)
        )
    return out


def _frontier_steps(tables: StageTables, call: int, option: int, zero: int, in_flight: float) -> Iterable[_Step]:
    """Yield the steps from an option of a call to faster ones that save more."""
    block = tables.graph.calls[call].block
    seconds = {number: of[block].pass_seconds for (number, at), of in zip(tables.names, tables.calls, strict=True) if at == zero}
    sizes = [tables.held * in_flight * saved[call] for saved in tables.saved]
    while True:
        faster = [each for each in seconds if seconds[each] < seconds[option] and sizes[each] > sizes[option]]
        if not faster:
            return
        best = max(faster, key=lambda each: (seconds[option] - seconds[each]) / (sizes[each] - sizes[option]))
        yield _Step(call, best, seconds[option] - seconds[best], sizes[best] - sizes[option])
        option = best
