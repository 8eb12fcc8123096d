"""The declaration of a named schedule (its actions, where its model chunks lie, the estimates by which the search ranks it), and
the orders that several schedules share, interleaved and V-shaped."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, INPUT, WEIGHT, Action

Passes = list[tuple[int, int]]
"""(chunk, micro-batch)."""


def chunked_bubble(virtual: int, micro_batches: int) -> float:
    """Return the bubble of 1F1B: filling and draining take one pass of a chunk for each further stage."""
    return 1.0 / virtual


def stages_in_flight(stages: int, virtual: int, micro_batches: int) -> float:
    """Return as many micro-batches as there are stages."""
    return float(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBuilder:
    """A named schedule.

    `actions(stages, virtual, micro_batches, rank)` are the computing actions of one pipeline stage, and `check` says for which
    numbers. `position` orders names in messages, in the search and among schedules of one makespan.

    Chunk c lies on stage ``c mod stages``; with `v_shaped`, each stage has two chunks, and the second ones go back from the last
    stage to the first. At least `micro_batches_per_stage` times as many micro-batches as stages are needed. With
    `splits_backward` weight gradients have actions of their own.

    For the search: it looks at the schedule unasked where `searched`, with several chunks a stage where `interleaved`.
    `bubble_passes(virtual, micro_batches)` is what filling and draining cost for each further stage, in passes of one micro-batch
    through a stage; `in_flight(stages, virtual, micro_batches)` the micro-batches that a stage holds, on average over the stages.
    Both are estimates: the evaluator runs the actions.
    """

    name: str
    position: int = 100
    actions: Callable[[int, int, int, int], tuple[Action, ...]]
    v_shaped: bool = False
    splits_backward: bool = False
    micro_batches_per_stage: int = 0
    searched: bool = False
    interleaved: bool = False
    bubble_passes: Callable[[int, int], float] = chunked_bubble
    in_flight: Callable[[int, int, int], float] = stages_in_flight

    def check(self, stages: int, virtual: int, micro_batches: int) -> None:
        """Raise PlanError where these numbers make no such schedule."""
        if min(stages, virtual, micro_batches) < 1:
            raise PlanError(
                f"a schedule of {stages} stages, {virtual} chunks and {micro_batches} micro-batches: each is 1 or more"
            )
        if self.v_shaped and virtual != 2:
            raise PlanError(f"{self.name} has 2 chunks a stage, not {virtual}: write virtual=2")
        least = self.micro_batches_per_stage * stages
        if micro_batches < least:
            raise PlanError(
                f"{self.name} takes at least {least} micro-batches on {stages} stages, not {micro_batches}: enlarge the batch"
            )


def group_of(stages: int, micro_batches: int) -> int:
    """Return how many micro-batches go through a chunk before the stage takes its next chunk: p, or as many more as make the
    groups equal (`ScheduleInterleaved1F1B` of torch: 10 micro-batches on 4 stages are two groups of 5)."""
    groups = max(1, micro_batches // stages)
    return stages if micro_batches % groups else micro_batches // groups


def interleaved_passes(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Passes, Passes]:
    """Return the order of the forwards and that of the backwards, in whole groups: what is beyond `micro_batches` is left out
    afterwards. That keeps the order free of deadlocks, since micro-batches do not depend on each other."""
    group = group_of(stages, micro_batches) if virtual > 1 else micro_batches
    starts = range(0, micro_batches, group)
    chunks = range(rank, stages * virtual, stages)
    forward = [(chunk, micro) for at in starts for chunk in chunks for micro in range(at, at + group)]
    backward = [(chunk, micro) for at in starts for chunk in reversed(chunks) for micro in range(at, at + group)]
    return forward, backward


class VShapedStage:
    """The actions of a stage with two chunks, c and, on the way back, 2p - 1 - c (ZB-V, DualPipeV). It counts per chunk (0 or 1,
    on the way there or back) the next micro-batch of each kind."""

    def __init__(self, stages: int, rank: int) -> None:
        self.chunks = rank, 2 * stages - 1 - rank
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, str]] = Counter()
        self.deferred: deque[tuple[int, int]] = deque()

    def count(self, way: int, kind: str) -> int:
        return self.counts[way, kind]

    def add(self, *steps: str) -> None:
        """Append actions, such as ``"F0"``: the next forward on the way there. I and W count as one half of B each."""
        for step in steps:
            kind, way = step[0], int(step[1])
            number = self.counts[way, INPUT if kind == BACKWARD else kind]
            self.actions.append(Action(self.chunks[way], kind, number))
            for counted in (INPUT, WEIGHT) if kind == BACKWARD else (kind,):
                self.counts[way, counted] += 1
            if kind == INPUT:
                self.deferred.append((way, number))

    def add_weight_gradients(self) -> None:
        """Append the weight gradients of the oldest input-gradient action that deferred them, if there is one."""
        if self.deferred:
            way, number = self.deferred.popleft()
            self.actions.append(Action(self.chunks[way], WEIGHT, number))
            self.counts[way, WEIGHT] += 1


def v_bubble(virtual: int, micro_batches: int) -> float:
    """Return the bubble of a V, of which both ends are on stage 0: almost no stage waits."""
    return 1 / 6
