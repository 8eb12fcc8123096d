"""A pipeline schedule with the cost models' times: when each stage ends, and how many micro-batches it has in flight.

Both are read from the actions of the schedule (``autopar.schedules``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.ir.plan import Pipeline
from autopar.schedules.builder import group_of
from autopar.schedules.check import InFlight, peak_in_flight
from autopar.schedules.clock import ChunkSeconds, RankSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import builder_named, chunks_of_stages, schedule_of
from autopar.schedules.shared_cores import SharedCores
from autopar.schedules.weight_versions import unroll_window, weight_version_window


def micro_batches_in_flight(pipeline: Pipeline, stage: int, micro_batches: int, saved_bytes: Sequence[float]) -> tuple[int, ...]:
    """Return per model chunk of `stage` its micro-batches in flight (until B or W) when the stage holds most; `saved_bytes`: what
    one micro-batch saves in each chunk. (A mean over the chunks would not do: interleaved, the last chunk has one in flight where
    the others have p, and its logits are large.)"""
    return tuple(each.whole + each.deferred for each in chunks_in_flight(pipeline, stage, micro_batches, saved_bytes))


def chunks_in_flight(
    pipeline: Pipeline, stage: int, micro_batches: int, saved_bytes: Sequence[float], weight_gradient_bytes: Sequence[float] = ()
) -> tuple[InFlight, ...]:
    """Return `micro_batches_in_flight` with those micro-batches apart of which only the `weight_gradient_bytes` are left, which W
    reads (inputs of linears and gradients of their results; all of `saved_bytes` where they are not given)."""
    if _all_forwards_first(pipeline):
        return (InFlight(micro_batches, 0),) * pipeline.virtual
    actions = schedule_of(pipeline, repeats_from(pipeline, micro_batches)).ranks[stage]
    return peak_in_flight(actions, chunks_of_stages(pipeline)[stage], saved_bytes, weight_gradient_bytes)


def splits_backward(pipeline: Pipeline, micro_batches: int) -> bool:
    """Return whether weight gradients have actions of their own."""
    if pipeline.stages == 1 or pipeline.weight_versions > 1:
        return False
    if pipeline.actions:
        return schedule_of(pipeline, micro_batches).splits_backward
    return builder_named(pipeline.schedule).splits_backward


def _all_forwards_first(pipeline: Pipeline) -> bool:
    return pipeline.schedule == "gpipe" and not pipeline.actions


def repeats_from(pipeline: Pipeline, micro_batches: int) -> int:
    """Return the number of micro-batches (at most all) from which on a builder's order repeats, p of them at a time: a few groups
    of p with the same remainder. (A remainder that is divided among the groups makes larger groups, of which there are few.)"""
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
    waits: Sequence[ChunkSeconds] = (),
    ranks_per_core: float = 1.0,
) -> tuple[RankSeconds, ...]:
    """Simulate a schedule: an action begins when its stage is free and its input has arrived. The makespan is the largest end.

    `transfer_seconds[c]` is one transfer between chunks c and c + 1, the same both ways, where they are on different stages; with
    `blocking` the sender stalls meanwhile. Many micro-batches are not simulated one by one: the clock of a fixed order of actions
    is periodic after a start (max-plus algebra: Baccelli et al., Synchronization and Linearity, theorem 3.109), so periods that
    agree stand for all others. Where ranks share cores, see `schedules.shared_cores`: `waits` are
    parts of `chunks`.
    """
    if pipeline.weight_versions > 1:
        return _undrained_clock(pipeline.stages, micro_batches, chunks, transfer_seconds, blocking)

    if ranks_per_core > 1:
        clock = _clock(pipeline.stages, pipeline.virtual, pipeline.schedule, pipeline.actions, micro_batches)
        return SharedCores(clock, ranks_per_core, waits).run(chunks, transfer_seconds, blocking)

    def walk(many: int) -> tuple[RankSeconds, ...]:
        return _clock(pipeline.stages, pipeline.virtual, pipeline.schedule, pipeline.actions, many).run(
            chunks, transfer_seconds, blocking
        )

    period = pipeline.stages
    start = repeats_from(pipeline, micro_batches)
    if micro_batches <= start + 5 * period or _all_forwards_first(pipeline):
        return walk(micro_batches)
    some = [walk(start + extra * period) for extra in (0, 1, 2, 4)]
    one, two, four = (_growth(before, after) for before, after in zip(some, some[1:], strict=False))
    if not _agree(one, two, 1) or not _agree(one, four, 2):
        return walk(micro_batches)
    times = (micro_batches - start) // period
    return tuple(
        RankSeconds(stage.busy_seconds + times * busy, stage.end_seconds + times * end)
        for stage, (busy, end) in zip(some[0], one, strict=True)
    )


def _undrained_clock(
    stages: int, micro_batches: int, chunks: Sequence[ChunkSeconds], transfer_seconds: Sequence[float], blocking: bool
) -> tuple[RankSeconds, ...]:
    """Simulate a step in the middle of many without a flush between them (PipeDream-2BW): what a third one adds to two."""
    window = weight_version_window(stages, micro_batches)
    two, three = (ScheduleClock.of(unroll_window(window, steps)).run(chunks, transfer_seconds, blocking) for steps in (2, 3))
    period = max(stage.end_seconds for stage in three) - max(stage.end_seconds for stage in two)
    pairs = zip(two, three, strict=True)
    return tuple(RankSeconds(after.busy_seconds - before.busy_seconds, period) for before, after in pairs)


@lru_cache(maxsize=256)
def _clock(stages: int, virtual: int, name: str, text: str, micro_batches: int) -> ScheduleClock:
    return ScheduleClock.of(schedule_of(Pipeline(stages, virtual, name, actions=text), micro_batches))


def _growth(before: Sequence[RankSeconds], after: Sequence[RankSeconds]) -> list[tuple[float, float]]:
    """Return what a period adds to each stage: (busy, end)."""
    pairs = zip(before, after, strict=True)
    return [(two.busy_seconds - one.busy_seconds, two.end_seconds - one.end_seconds) for one, two in pairs]


def _agree(one: Sequence[tuple[float, float]], more: Sequence[tuple[float, float]], times: int) -> bool:
    return all(abs(times * a - b) <= 1e-9 * b for x, y in zip(one, more, strict=True) for a, b in zip(x, y, strict=True))
