"""The schedule of a pipeline: built by its name (`schedules.builders`), or parsed from its own text."""

from __future__ import annotations

from functools import lru_cache

from autopar.errors import PlanError
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.schedule import Schedule
from autopar.schedules.check import check
from autopar.schedules.list_builders import builder_named


def schedule_of(pipeline: Pipeline, micro_batches: int) -> Schedule:
    """Return the computing actions of a pipeline's schedule. PlanError where there is no such schedule, or its text does not fit
    the pipeline."""
    return _schedule(pipeline.stages, pipeline.virtual, pipeline.schedule, pipeline.actions, micro_batches)


def check_schedule(candidate: Candidate) -> None:
    """Raise PlanError where the candidate's pipeline has no schedule that can run."""
    if candidate.pipeline.stages > 1:
        schedule_of(candidate.pipeline, candidate.micro_batches)


@lru_cache(maxsize=256)
def _schedule(stages: int, virtual: int, name: str, actions: str, micro_batches: int) -> Schedule:
    if actions:
        return _check(_parse(actions, name), stages, virtual, micro_batches)
    builder = builder_named(name)
    builder.check(stages, virtual, micro_batches)
    return Schedule(name, tuple(builder.actions(stages, virtual, micro_batches, rank) for rank in range(stages)))


@lru_cache(maxsize=16)
def _parse(text: str, name: str) -> Schedule:
    return Schedule.parse(text, name)


def _check(schedule: Schedule, stages: int, virtual: int, micro_batches: int) -> Schedule:
    check(schedule)
    sizes = len(schedule.ranks), schedule.chunks, schedule.micro_batches
    if sizes != (stages, stages * virtual, micro_batches):
        raise PlanError(
            f"the schedule {schedule.name} has {sizes[0]} ranks, {sizes[1]} chunks and {sizes[2]} micro-batches, "
            f"the pipeline {stages}, {stages * virtual} and {micro_batches}"
        )
    return schedule
