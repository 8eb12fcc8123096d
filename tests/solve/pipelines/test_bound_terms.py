"""What bounds of pipelines are made of, each against the cost model that it is a bound of."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import pairwise
from random import Random

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.plans.pipeline_grid import PipelineGrid

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import stage_traces
from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of, stage_of_chunks
from autopar.solve.bounds.call_state import CallState, undominated
from autopar.solve.bounds.timed_actions import TimedSchedule, spread_micro_batches, timed_schedule
from autopar.solve.pipeline.stage_relaxation import least_working_bytes
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.pipeline_grid import schedule_options


@pytest.mark.parametrize(
    ("stages", "virtual", "schedule", "micro_batches"),
    [(2, 1, "1f1b", 4), (4, 1, "zb-h1", 8), (4, 2, "zbv", 8), (3, 4, "1f1b", 6), (4, 2, "dualpipev", 8)],
)
def test_timed_actions_end_as_on_the_clock(stages: int, virtual: int, schedule: str, micro_batches: int) -> None:
    """With durations and transfers drawn at random; transfers so short that none waits for another one."""
    pipeline, random = Pipeline(stages, virtual, schedule), Random(1)
    clock = ScheduleClock.of(schedule_of(pipeline, micro_batches))
    every = timed_schedule(schedule_of(pipeline, micro_batches), range(micro_batches))
    some = timed_schedule(schedule_of(pipeline, micro_batches), spread_micro_batches(stages, micro_batches, 0.5))
    assert len(some.actions) <= len(every.actions)
    for _ in range(5):
        chunks = [
            ChunkSeconds(
                random.uniform(1, 3), random.uniform(3, 5), random.uniform(1, 4), random.uniform(3, 6), weight_backward=1.5
            )
            for _ in range(stages * virtual)
        ]
        lags = [0.0 if here == there else random.uniform(0.0, 0.5) for here, there in pairwise(stage_of_chunks(pipeline))]
        table = [seconds for chunk in chunks for seconds in chunk.slots]
        found = [rank.end_seconds for rank in clock.run(chunks, lags)]
        assert ends_of(every, table, lags) == pytest.approx(found)
        some_ends = ends_of(some, table, lags)
        assert all(0.5 * end < seconds <= end * (1 + 1e-9) for seconds, end in zip(some_ends, found, strict=True))


def ends_of(timed: TimedSchedule, table: list[float], lags: list[float]) -> list[float]:
    """When each stage ends."""
    ends: list[float] = []
    for action in timed.actions:
        end = ends[action.before] if action.before >= 0 else 0.0
        end += sum(table[slot] * count for slot, count in action.busy.items())
        if action.after >= 0:
            end = max(end, ends[action.after] + lags[action.cut] + table[action.slot])
        ends.append(end)
    return [ends[last] + sum(table[slot] * count for slot, count in rest.items()) for last, rest in timed.ends]


def test_dominated_state_is_left_out() -> None:
    random = Random(0)
    states = [CallState(*(float(random.randint(0, 3)) for _ in range(8))) for _ in range(60)]
    kept = undominated(states)
    assert 1 < len(kept) < 60

    def below(one: CallState, other: CallState) -> bool:
        return all(a <= b for a, b in zip(astuple(one), astuple(other), strict=True))

    assert all(any(below(one, state) for one in kept) for state in states)
    assert not any(below(one, other) for one in kept for other in kept if one is not other)


def test_no_backward_works_with_less() -> None:
    """Of the blocks of pipelines that the search finds."""
    graph = gpt2_graph(layers=6, hidden=128, heads=4, vocabulary=512, seq=64, batch=8)
    cluster, options = replace(Cluster.parse("dgx-h100:1"), size=4), SearchOptions()
    search = PipelineGrid(graph, cluster, options)
    ratios = []
    for point in search.points:
        problem = search.problem(point)
        least = {name: least_working_bytes(problem, name) for name in problem.blocks}
        found = search.stage_search.solve_point(point, schedule_options(search.graph, point, {}, "")[0])
        if found is None or found.graph is None or found.candidate is None:
            continue
        for name, trace in stage_traces(found.graph, found.candidate, cluster)[0].items():
            of = least.get(name, least.get(name.rpartition("_")[0], 0.0))
            assert of <= trace.memory.backward_bytes * (1 + 1e-9), f"{point} {name}"
            ratios.append(of / trace.memory.backward_bytes)
    assert len(ratios) >= 10
    assert max(ratios) > 0.8
