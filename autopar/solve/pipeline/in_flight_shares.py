"""How many micro-batches a pipeline's calls hold at least, whatever its partition: what the order of a schedule's actions says
alone.

The order of a stage's actions does not depend on how long they take. So at one place in it the stage holds so many micro-batches
of each of its chunks; and no stage has more calls than it can compute in a step. The calls of the relaxation go where least is in
flight.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from autopar.cost_models.step.pipeline_clock import repeats_from
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, Action
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.placement import chunks_of_stages

_MOST_SHARES = 8


@dataclass(frozen=True, slots=True)
class ScheduleProfile:
    """`in_flight`: per stage, the micro-batches that it holds of each of its chunks, the fewest first. `drains`: every stage ends
    with the backward of its first chunk, so that the stages before it go on after that."""

    in_flight: tuple[tuple[int, ...], ...]
    drains: bool

    @property
    def virtual(self) -> int:
        return len(self.in_flight[0])


@lru_cache(maxsize=1024)
def schedule_profile(stages: int, virtual: int, schedule: str, micro_batches: int) -> ScheduleProfile:
    """Of a named schedule."""
    pipeline = Pipeline(stages, virtual, schedule)
    ranks = schedule_of(pipeline, repeats_from(pipeline, micro_batches)).ranks
    chunks = chunks_of_stages(pipeline)
    held = tuple(_most_held(actions, mine) for actions, mine in zip(ranks, chunks, strict=True))
    drains = all(
        actions[-1].kind == BACKWARD and actions[-1].chunk == stage == mine[0]
        for stage, (actions, mine) in enumerate(zip(ranks, chunks, strict=True))
    )
    return ScheduleProfile(held, drains)


def _most_held(actions: Sequence[Action], chunks: Sequence[int]) -> tuple[int, ...]:
    """Where the least of the chunks is most."""
    now = dict.fromkeys(chunks, 0)
    best = (0, 0), (0,) * len(chunks)
    for action in actions:
        now[action.chunk] += {FORWARD: 1, BACKWARD: -1, INPUT: -1}.get(action.kind, 0)
        if action.kind == FORWARD:
            best = max(best, ((min(now.values()), sum(now.values())), tuple(sorted(now.values()))))
    return best[1]


def in_flight_shares(profile: ScheduleProfile, calls: int, others: int, most_calls: float) -> tuple[tuple[float, int], ...]:
    """(share of a block's `calls`, micro-batches in flight), below every partition whose stages have at most `most_calls` of
    them. Every chunk has a call, and `others` chunks may be calls of other blocks."""
    apart = [count for stage in profile.in_flight for count in stage[1:]]
    apart = sorted(apart)[: max(0, min(len(apart) - others, calls))]
    most = max(1.0, most_calls - max(0, profile.virtual - 1 - others))
    left = float(calls - len(apart))
    parts = [(1.0, count) for count in apart]
    for stage in sorted(profile.in_flight):
        taken = min(left, most)
        parts.append((taken, stage[0]))
        left -= taken
    parts.append((max(0.0, left), max(stage[0] for stage in profile.in_flight)))
    return _merged([(size / calls, count) for size, count in sorted(parts, key=lambda each: each[1]) if size > 0])


def least_shares(every: Sequence[Sequence[tuple[float, int]]]) -> tuple[tuple[float, int], ...]:
    """Below each of them: at every quantile of the calls the fewest micro-batches."""
    if len(every) == 1:
        return tuple(every[0])
    ends = [[*accumulate(share for share, _ in each)] for each in every]
    out, before = [], 0.0
    for end in sorted({min(1.0, end) for each in ends for end in each}):
        if end - before > 1e-9:
            middle = (before + end) / 2
            counts = [each[min(bisect(at, middle), len(each) - 1)][1] for each, at in zip(every, ends, strict=True)]
            out.append((end - before, min(counts)))
            before = end
    return _merged(out)


def _merged(parts: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Few shares, each with the fewest micro-batches of those that it is made of."""
    out: list[tuple[float, int]] = []
    for share, count in parts:
        if out and (out[-1][1] == count or out[-1][0] + share <= 1 / _MOST_SHARES):
            out[-1] = out[-1][0] + share, out[-1][1]
        else:
            out.append((share, count))
    return tuple(out)
