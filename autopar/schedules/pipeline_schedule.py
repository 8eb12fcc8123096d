"""The schedule of a pipeline: built by its name, or parsed from its own text; and the placement of its model chunks, of which
each stage has `virtual`, by the schedule's name or by its actions. The named schedules are every file of
`autopar.schedules.builders`, found by listing the folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules
from re import compile as pattern
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


_CHUNK = pattern(r"^(\d+)[A-Z]")
"""The chunk of an action alone: the text of a long schedule is not parsed for that."""


def chunks_of_stages(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each pipeline stage, in the model's order: chunk c is on stage ``c mod stages``; V-shaped, the second
    half of them goes back. The actions of a pipeline say it themselves. PlanError for an unknown schedule, or chunks that are not
    those of the pipeline."""
    stages, virtual = pipeline.stages, pipeline.virtual
    if pipeline.actions:
        return _of_actions(pipeline)
    if stages > 1 and builder_named(pipeline.schedule).v_shaped and virtual == 2:
        return tuple((stage, 2 * stages - 1 - stage) for stage in range(stages))
    return tuple(tuple(range(stage, stages * virtual, stages)) for stage in range(stages))


def _of_actions(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    matches_of_ranks = (map(_CHUNK.match, line.split()) for line in pipeline.actions.splitlines() if line.strip())
    out = tuple(tuple(sorted({int(match[1]) for match in matches if match})) for matches in matches_of_ranks)
    placed, chunks = sorted(chunk for stage in out for chunk in stage), pipeline.stages * pipeline.virtual
    if len(out) != pipeline.stages or placed != list(range(chunks)):
        raise PlanError(
            f"the schedule's text has {len(out)} ranks with chunks {placed}: {pipeline.stages} stages share out {chunks}"
        )
    return out


def stage_of_chunks(pipeline: Pipeline) -> tuple[int, ...]:
    """Return the pipeline stage of every chunk, in the model's order."""
    stage_of = {chunk: stage for stage, chunks in enumerate(chunks_of_stages(pipeline)) for chunk in chunks}
    return tuple(stage_of[chunk] for chunk in range(pipeline.stages * pipeline.virtual))
