"""Calls move between chunks as long as the schedule's clock gets faster: against every cut there is."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from autopar.ir.plan import Pipeline
from autopar.solve.pipeline.stage_cuts import CutClock, PassSeconds, move_calls

CASES = [(2, 1, "1f1b", 4), (2, 2, "1f1b", 4), (2, 2, "zbv", 4), (3, 1, "zb-h1", 6), (2, 3, "1f1b", 2), (4, 1, "gpipe", 4)]


def clock_of(seed: int, case: tuple[int, int, str, int], calls: int) -> CutClock:
    """Calls of random seconds; the first and the last one are an embedding and a head."""
    draw = random.Random(seed)
    stages, virtual, schedule, micro_batches = case
    seconds = []
    for call in range(calls):
        forward = draw.uniform(0.9, 1.1) * (0.1 if call == 0 else 0.7 if call == calls - 1 else 1.0)
        backward = forward * draw.uniform(1.8, 3.0)
        seconds.append(PassSeconds(micro_batches * (forward + backward) + 0.3, forward, backward, forward))
    sends = [[draw.uniform(0.0, 0.2)] * calls for _ in range(stages * virtual - 1)]
    return CutClock.of(Pipeline(stages, virtual, schedule), micro_batches, seconds, sends, 1.0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_best_of_all_cuts(case: tuple[int, int, str, int]) -> None:
    calls, chunks = 13, case[0] * case[1]
    equal = tuple(place * calls // chunks for place in range(chunks + 1))
    ratios, faster = [], 0
    for seed in range(4):
        clock = clock_of(seed, case, calls)
        every = [(0, *cut, calls) for cut in combinations(range(1, calls), chunks - 1)]
        best = min(map(clock.step_seconds, every))
        edges = move_calls(equal, clock, range(calls + 1))
        assert edges in every and clock.step_seconds(edges) <= clock.step_seconds(equal)
        ratios.append(clock.step_seconds(edges) / best)
        faster += clock.step_seconds(edges) < clock.step_seconds(equal)
    assert min(ratios) >= 1 - 1e-12 and max(ratios) < 1.06 and sum(ratios) / len(ratios) < 1.02, ratios
    assert faster


def test_chunks_begin_where_they_may() -> None:
    """Of places in pairs, as halves of layers are that only a whole layer may leave."""
    clock, cuts = clock_of(1, (2, 2, "1f1b", 4), 13), [0, 2, 4, 6, 8, 10, 12, 13]
    edges = move_calls((0, 2, 4, 8, 13), clock, cuts)
    assert set(edges) <= set(cuts) and clock.step_seconds(edges) < clock.step_seconds((0, 2, 4, 8, 13))


def test_a_stage_that_computes_too_long_is_not_clocked() -> None:
    """What a stage computes is below its end, so the rival's seconds need no clock."""
    clock = clock_of(0, (2, 1, "1f1b", 4), 6)
    seconds = clock.step_seconds((0, 3, 6))
    assert clock.step_seconds((0, 3, 6), seconds) == seconds
    assert clock.step_seconds((0, 3, 6), 0.5 * seconds) == float("inf")
