"""How many micro-batches a pipeline's calls hold at least, whatever its partition: what the order of a schedule's actions says
alone.

The order of a stage's actions does not depend on how long they take. So at one place in it the stage holds so many micro-batches
of each of its chunks. The calls of the relaxation go where least is in flight (`bounds.call_levels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.cost_models.step.pipeline_clock import repeats_from
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, Action
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.placement import chunks_of_stages
from autopar.solve.bounds.call_levels import CallLevel

_MOST_LEVELS, _MOST_LEVELS_BESIDE = 8, 2


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


def call_levels(profiles: Sequence[ScheduleProfile]) -> tuple[CallLevel, ...]:
    """Below every partition under each of the schedules, on as many stages. The calls of a stage count as those of its chunk that
    holds least, but for one call of each other chunk."""
    first = _least([sorted(stage[0] for stage in profile.in_flight) for profile in profiles])
    beside = [sorted(count for stage in profile.in_flight for count in stage[1:]) for profile in profiles]
    fewest = min(map(len, beside))
    others = _least([each[len(each) - fewest :] for each in beside])
    return (
        *(CallLevel(count, stages=number) for count, number in _merged(first, _MOST_LEVELS)),
        *(CallLevel(count, chunks=number) for count, number in _merged(others, _MOST_LEVELS_BESIDE)),
    )


def _least(every: Sequence[Sequence[int]]) -> list[int]:
    """Of ordered counts, at each place the least."""
    return [min(counts) for counts in zip(*every, strict=True)]


def _merged(counts: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Few (count, how often) of ordered counts, each the least of those that it is made of."""
    size = max(1, -(-len(counts) // most))
    found = Counter[int]()
    for start in range(0, len(counts), size):
        found[counts[start]] += len(counts[start : start + size])
    return sorted(found.items())
