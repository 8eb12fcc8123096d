"""The placement of a pipeline's model chunks: each stage has `virtual` of them, by the schedule's name or by its actions."""

from __future__ import annotations

from re import compile as pattern

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.schedules.pipeline_schedule import builder_named

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
