"""The schedule of a pipeline: by its name, or from its text. GPipe: Huang et al., arXiv 1811.06965."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from autopar.errors import PlanError
from autopar.ir.chunks import SCHEDULES, V_SHAPED, rank_of_chunks
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, Action, Schedule
from autopar.schedules.alternating import one_forward_one_backward, zero_bubble_h1
from autopar.schedules.check import check
from autopar.schedules.v_shaped import dual_pipe_v, zero_bubble_v

__all__ = ["NAMES", "V_SHAPED", "rank_of_chunks", "schedule_of"]
NAMES = SCHEDULES


def naive(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """One micro-batch after the other through the whole pipeline."""
    mine = range(rank, stages * virtual, stages)
    each = [(chunk, FORWARD) for chunk in mine] + [(chunk, BACKWARD) for chunk in reversed(mine)]
    return tuple(Action(chunk, kind, micro) for micro in range(micro_batches) for chunk, kind in each)


def gpipe(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """All forwards, then all backwards."""
    mine, all_of_them = range(rank, stages * virtual, stages), range(micro_batches)
    forward = [Action(chunk, FORWARD, micro) for chunk in mine for micro in all_of_them]
    return (*forward, *(Action(chunk, BACKWARD, micro) for chunk in reversed(mine) for micro in all_of_them))


def schedule_of(pipeline: Pipeline, micro_batches: int) -> Schedule:
    """Computing actions only. PlanError where there is no such schedule, or its text does not fit the pipeline."""
    return _schedule(pipeline.stages, pipeline.virtual, pipeline.schedule, pipeline.actions, micro_batches)


@lru_cache(maxsize=256)
def _schedule(stages: int, virtual: int, name: str, actions: str, micro_batches: int) -> Schedule:
    if actions:
        return _fitting(_parsed(actions, name), stages, virtual, micro_batches)
    if name not in NAMES:
        raise PlanError(f"no schedule {name!r}: write {', '.join(NAMES[:-1])} or {NAMES[-1]}, or give its actions")
    if min(stages, virtual, micro_batches) < 1:
        raise PlanError(f"a schedule of {stages} stages, {virtual} chunks and {micro_batches} micro-batches: each is 1 or more")
    builder = _builders()[name]
    return Schedule(name, tuple(builder(stages, virtual, micro_batches, rank) for rank in range(stages)))


def _builders() -> dict[str, Callable[[int, int, int, int], tuple[Action, ...]]]:
    made = (naive, gpipe, one_forward_one_backward, zero_bubble_h1, zero_bubble_v, dual_pipe_v)
    return dict(zip(NAMES, made, strict=True))


@lru_cache(maxsize=16)
def _parsed(text: str, name: str) -> Schedule:
    return Schedule.parse(text, name)


def _fitting(schedule: Schedule, stages: int, virtual: int, micro_batches: int) -> Schedule:
    check(schedule)
    found = len(schedule.ranks), schedule.chunks, schedule.micro_batches
    if found != (stages, stages * virtual, micro_batches):
        raise PlanError(
            f"the schedule {schedule.name} has {found[0]} ranks, {found[1]} chunks and {found[2]} micro-batches, "
            f"the pipeline {stages}, {stages * virtual} and {micro_batches}"
        )
    return schedule
