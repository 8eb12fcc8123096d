"""The schedule of a pipeline: built by its name, or parsed from its own text. The named schedules are every file of
`autopar.schedules.builders`, found by listing the folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from autopar.errors import PlanError
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.schedule import Schedule
from autopar.schedules import builders as folder
from autopar.schedules.builder import ScheduleBuilder
from autopar.schedules.check import check


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


INTERLEAVED = "interleaved"
"""The name that people give to the builder ``1f1b`` with several model chunks a stage."""


@cache
def schedule_builders() -> Mapping[str, ScheduleBuilder]:
    """Return the builders by name, in the order of their positions."""
    modules = (import_module(f"{folder.__name__}.{each.name}") for each in iter_modules(folder.__path__))
    builders: list[ScheduleBuilder] = sorted((module.BUILDER for module in modules), key=lambda each: (each.position, each.name))
    return MappingProxyType({each.name: each for each in builders})


def schedule_names() -> tuple[str, ...]:
    """Names of schedules that have a builder; any other one comes with its actions."""
    return tuple(schedule_builders())


def builder_named(name: str, remedy: str = "give its actions", also: tuple[str, ...] = ()) -> ScheduleBuilder:
    """Return the builder of a name. PlanError where there is none, with what else one may write (`also`: names that stand for a
    builder and a number of chunks): the only place that refuses a schedule's name."""
    builder = schedule_builders().get(name)
    if builder is None:
        *most, last = (*schedule_names(), *also)
        raise PlanError(f"no schedule {name!r}: write {', '.join(most)} or {last}, or {remedy}")
    return builder
