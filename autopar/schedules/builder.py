"""What a named schedule declares: its actions, where its model chunks lie, and the estimates by which the search ranks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.schedule import Action


def chunked_bubble(virtual: int, micro_batches: int) -> float:
    """1F1B: filling and draining take one pass of a chunk for each further stage."""
    return 1.0 / virtual


def stages_in_flight(stages: int, virtual: int, micro_batches: int) -> float:
    """As many micro-batches as there are stages."""
    return float(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBuilder:
    """A schedule that is known by its name.

    `actions(stages, virtual, micro_batches, rank)` are the computing actions of one pipeline stage, and `check` says for which
    numbers. `position` orders names in messages, in the search and among schedules of one makespan.

    Chunk c lies on stage ``c mod stages``; with `v_shaped`, each stage has two chunks, and the second ones go back from the last
    stage to the first. At least `micro_batches_per_stage` times as many micro-batches as stages are needed.

    For the search: it looks at the schedule unasked where `searched`, with several chunks a stage where `interleaved`.
    `bubble_passes(virtual, micro_batches)` is what filling and draining cost for each further stage, in passes of one micro-batch
    through a stage; `in_flight(stages, virtual, micro_batches)` the micro-batches that a stage holds, on average over the stages.
    Both are estimates: the evaluator runs the actions.
    """

    name: str
    position: int = 100
    actions: Callable[[int, int, int, int], tuple[Action, ...]]
    v_shaped: bool = False
    micro_batches_per_stage: int = 0
    searched: bool = False
    interleaved: bool = False
    bubble_passes: Callable[[int, int], float] = chunked_bubble
    in_flight: Callable[[int, int, int], float] = stages_in_flight

    def check(self, stages: int, virtual: int, micro_batches: int) -> None:
        """PlanError where these numbers make no such schedule."""
        if min(stages, virtual, micro_batches) < 1:
            raise PlanError(
                f"a schedule of {stages} stages, {virtual} chunks and {micro_batches} micro-batches: each is 1 or more"
            )
        if self.v_shaped and virtual != 2:
            raise PlanError(f"{self.name} has 2 chunks a stage, not {virtual}: write virtual=2")
        least = self.micro_batches_per_stage * stages
        if micro_batches < least:
            raise PlanError(f"{self.name} takes at least {least} micro-batches on {stages} stages, not {micro_batches}: enlarge the batch")
