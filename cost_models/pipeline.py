"""A pipeline's schedule with the cost models' times: its clock, and how many micro-batches a stage holds.

Whatever is said here is read from the schedule's own actions (autopar.schedules). A *chunk* is a run of consecutive calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.ir.chunks import chunks_of_ranks
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Action
from autopar.schedules.alternating import group_of
from autopar.schedules.build import schedule_of
from autopar.schedules.clock import ChunkSeconds, Clock, RankSeconds
from autopar.schedules.held import Held, most_held
from autopar.schedules.held import held as held_by
from autopar.schedules.two_versions import unrolled, window

__all__ = [
    *("ChunkSeconds", "Held", "StageSeconds", "actions", "chunks_of", "held", "held_apart", "in_flight", "part_of"),
    "run_schedule",
]
StageSeconds = RankSeconds


def chunks_of(pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    """The chunks of a stage, in the model's order."""
    return chunks_of_ranks(pipeline)[stage]


def part_of(cluster: Cluster, stages: int) -> Cluster:
    """The devices of one of `stages` equal neighbouring parts, on the same links. PlanError where they do not divide."""
    if stages == 1:
        return cluster
    if cluster.size % stages:
        raise PlanError(f"{cluster.name} has {cluster.size} devices, which {stages} pipeline stages do not divide")
    return replace(cluster, size=cluster.size // stages)


def actions(pipeline: Pipeline, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """What a stage runs, in order. PlanError where there is no such schedule."""
    return schedule_of(pipeline, micro_batches).ranks[stage]


def in_flight(pipeline: Pipeline, stage: int, micro_batches: int) -> int:
    """The most (micro-batch, chunk) pairs of which `stage` holds anything at once. 1F1B: ``min(m, p - s)``; GPipe: ``m v``;
    interleaved: ``min(m v, 2 (p - s - 1) + (v - 1) p + 1)``; ZB-H1: ``min(m, p)``."""
    if _all_forwards_first(pipeline):
        return micro_batches * pipeline.virtual
    return most_held(actions(pipeline, stage, _repeats_from(pipeline, micro_batches)))


def held(pipeline: Pipeline, stage: int, micro_batches: int, kept_bytes: Sequence[float]) -> tuple[int, ...]:
    """Per chunk of `stage`, how many micro-batches it holds (until B or W) when the stage holds most; `kept_bytes`: what one
    micro-batch keeps in each. Interleaved, the last chunk holds one where the others hold p: the mean would hold its logits
    several times."""
    return tuple(each.whole + each.late for each in held_apart(pipeline, stage, micro_batches, kept_bytes))


def held_apart(
    pipeline: Pipeline, stage: int, micro_batches: int, kept_bytes: Sequence[float], late_bytes: Sequence[float] = ()
) -> tuple[Held, ...]:
    """As `held`, and apart those micro-batches of which only `late_bytes` are left, which W reads (where that is not said: all).
    That is what linears multiply: their inputs, and the gradients of their results."""
    if _all_forwards_first(pipeline):
        return (Held(micro_batches, 0),) * pipeline.virtual
    mine = chunks_of(pipeline, stage)
    return held_by(actions(pipeline, stage, _repeats_from(pipeline, micro_batches)), mine, kept_bytes, late_bytes)


def _all_forwards_first(pipeline: Pipeline) -> bool:
    return pipeline.schedule == "gpipe" and not pipeline.actions


def _repeats_from(pipeline: Pipeline, micro_batches: int) -> int:
    """So many micro-batches that from there on a builder's order repeats, p of them at a time, up to all of them: a few
    groups of p with the same remainder. (A remainder that the groups share out makes larger groups, of which there are few.)"""
    p = pipeline.stages
    if pipeline.actions or group_of(p, micro_batches) != p:
        return micro_batches
    groups, rest = 4, micro_batches % p
    while rest and any(rest % (groups + extra) == 0 for extra in (0, 1, 2, 4)):
        groups += 1
    return min(micro_batches, groups * p + rest)


def run_schedule(
    pipeline: Pipeline,
    micro_batches: int,
    chunks: Sequence[ChunkSeconds],
    transfer_seconds: Sequence[float] = (),
    blocking: bool = False,
) -> tuple[StageSeconds, ...]:
    """Runs a schedule: an action begins when its stage is free and its input has arrived. The makespan is the largest end.

    `transfer_seconds[c]` is one transfer between chunks c and c + 1, the same both ways, where they are on different stages; with
    `blocking` the sender does nothing else meanwhile. Many micro-batches are not walked one by one: the clock of a fixed order of
    actions is periodic after a start (max-plus algebra: Baccelli et al., Synchronization and Linearity, theorem 3.109), so
    periods that agree stand for all others.
    """

    if pipeline.weight_versions > 1:
        return _undrained(pipeline.stages, micro_batches, chunks, transfer_seconds, blocking)

    def walk(many: int) -> tuple[StageSeconds, ...]:
        return _clock(pipeline.stages, pipeline.virtual, pipeline.schedule, pipeline.actions, many).run(
            chunks, transfer_seconds, blocking
        )

    period = pipeline.stages
    start = _repeats_from(pipeline, micro_batches)
    if micro_batches <= start + 5 * period or _all_forwards_first(pipeline):
        return walk(micro_batches)
    some = [walk(start + extra * period) for extra in (0, 1, 2, 4)]
    one, two, four = (_growth(before, after) for before, after in zip(some, some[1:], strict=False))
    if not _agree(one, two, 1) or not _agree(one, four, 2):
        return walk(micro_batches)
    times = (micro_batches - start) // period
    return tuple(
        StageSeconds(stage.busy_seconds + times * busy, stage.end_seconds + times * end)
        for stage, (busy, end) in zip(some[0], one, strict=True)
    )


def _undrained(
    stages: int, micro_batches: int, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float], blocking: bool
) -> tuple[StageSeconds, ...]:
    """A step in the middle of many that run one into the other: what a third one adds to two."""
    made = window(stages, micro_batches)
    two, three = (Clock.of(unrolled(made, steps)).run(chunks, transfer_seconds, blocking) for steps in (2, 3))
    period = max(stage.end_seconds for stage in three) - max(stage.end_seconds for stage in two)
    pairs = zip(two, three, strict=True)
    return tuple(StageSeconds(after.busy_seconds - before.busy_seconds, period) for before, after in pairs)


@lru_cache(maxsize=256)
def _clock(stages: int, virtual: int, name: str, text: str, micro_batches: int) -> Clock:
    return Clock.of(schedule_of(Pipeline(stages, virtual, name, actions=text), micro_batches))


def _growth(before: Sequence[StageSeconds], after: Sequence[StageSeconds]) -> list[tuple[float, float]]:
    """What a period adds to each stage: (busy, end)."""
    pairs = zip(before, after, strict=True)
    return [(two.busy_seconds - one.busy_seconds, two.end_seconds - one.end_seconds) for one, two in pairs]


def _agree(one: Sequence[tuple[float, float]], more: Sequence[tuple[float, float]], times: int) -> bool:
    return all(abs(times * a - b) <= 1e-9 * b for x, y in zip(one, more, strict=True) for a, b in zip(x, y, strict=True))
