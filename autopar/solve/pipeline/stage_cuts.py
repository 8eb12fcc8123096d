"""The cuts of a pipeline on the clock of its schedule: calls move from one chunk to another as long as the step gets shorter.

The dynamic program of `stage_partition` knows the largest load and an average bubble. Which chunks others wait for, and when,
only the clock knows: at the ends of the model short ones are worth most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from autopar.cost_models.step.pipeline_clock import run_schedule
from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ChunkSeconds
from autopar.schedules.pipeline_schedule import stage_of_chunks

Edges = tuple[int, ...]
"""The first calls of all chunks, and the number of calls."""

_NO_WAIT = (ChunkSeconds(0.0, 0.0, weight_backward=0.0),)

_MOST_ACTIONS = 40_000
"""Actions that the clock runs at most for the cuts of one pipeline: about a tenth of a second."""


class PassSeconds(NamedTuple):
    """The seconds of one call: in a step, and of one micro-batch its forward, its backward and the part of that which a schedule
    may delay."""

    step: float
    forward: float
    backward: float
    weights: float


@dataclass(frozen=True, slots=True)
class CutClock:
    """The clock of one pipeline. `sums`: of the seconds of all calls before each place. `transfer_seconds`: over a cut before
    each call, between each chunk and the next."""

    pipeline: Pipeline
    micro_batches: int
    sums: Sequence[PassSeconds]
    transfer_seconds: Sequence[Sequence[float]]
    ranks_per_core: float

    @staticmethod
    def of(
        pipeline: Pipeline,
        micro_batches: int,
        calls: Sequence[PassSeconds],
        transfer_seconds: Sequence[Sequence[float]],
        ranks_per_core: float,
    ) -> CutClock:
        """Return the clock of a pipeline whose calls take these seconds."""
        sums = map(PassSeconds, *(accumulate(each, initial=0.0) for each in zip(*calls, strict=True)))
        return CutClock(pipeline, micro_batches, tuple(sums), transfer_seconds, ranks_per_core)

    def step_seconds(self, edges: Edges, rival_seconds: float = inf) -> float:
        """Return the step with these cuts; infinite where a stage computes for `rival_seconds`."""
        loads, chunks = [0.0] * self.pipeline.stages, []
        for stage, (first, end) in zip(stage_of_chunks(self.pipeline), pairwise(edges), strict=True):
            before, after = self.sums[first], self.sums[end]
            loads[stage] += after.step - before.step
            weights = after.weights - before.weights
            chunks.append(
                ChunkSeconds(after.forward - before.forward, after.backward - before.backward, weight_backward=weights)
            )
        if max(loads) >= rival_seconds:
            return inf
        sends = [seconds[edge] for seconds, edge in zip(self.transfer_seconds, edges[1:-1], strict=True)]
        clocks = run_schedule(
            self.pipeline, self.micro_batches, chunks, sends, waits=_NO_WAIT * len(chunks), ranks_per_core=self.ranks_per_core
        )
        # what follows the last action: reductions that are left, the optimizer
        return max(each.end_seconds + load - each.busy_seconds for each, load in zip(clocks, loads, strict=True))


def move_calls(edges: Edges, clock: CutClock, cuts: Sequence[int]) -> Edges:
    """Return edges, of the places `cuts` where chunks may begin and end, that no move of one place from a chunk to another makes
    faster; or the best after `_MOST_ACTIONS`."""
    best = clock.step_seconds(edges)
    runs_left = _MOST_ACTIONS // (2 * (len(edges) - 1) * clock.micro_batches)
    improved = True
    while improved:
        improved = False
        for other in _neighbours(edges, cuts):
            seconds = clock.step_seconds(other, best)
            runs_left -= seconds < inf
            if seconds < best * (1 - 1e-9):
                edges, best, improved = other, seconds, True
                break
            if runs_left <= 0:
                return edges
    return edges


def _neighbours(edges: Edges, cuts: Sequence[int]) -> Iterator[Edges]:
    """Yield the edges after one place more in a chunk and one less in another: those between the two move by one."""
    chunks, numbers = len(edges) - 1, {cut: number for number, cut in enumerate(cuts)}
    at = [numbers[edge] for edge in edges]
    for first in range(1, chunks):
        for end in range(first, chunks):
            for by in (1, -1):
                moved = at[:first] + [number + by for number in at[first : end + 1]] + at[end + 1 :]
                if moved[first - 1] < moved[first] and moved[end] < moved[end + 1]:
                    yield tuple(cuts[number] for number in moved)
