"""Pipelines of ranks that share cores, against a simulation of cores that are divided evenly among the ranks at work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.step.pipeline_clock import run_schedule, shared_core_factor
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import FORWARD
from autopar.schedules.clock import ChunkSeconds, RankSeconds
from autopar.schedules.pipeline_schedule import schedule_of


def simulated_seconds(pipeline: Pipeline, micro_batches: int, chunks: list[ChunkSeconds], ranks_per_core: float) -> float:
    """The makespan when every rank at work gets an even share of the cores, and one core at most."""
    queues = [list(actions) for actions in schedule_of(pipeline, micro_batches).ranks]
    done: set[tuple[str, int, int]] = set()
    left: dict[int, float] = {}
    passed = 0.0
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and rank not in left:
                kind, chunk, batch = queue[0].kind, queue[0].chunk, queue[0].micro_batch
                forward = kind == FORWARD
                before = (FORWARD, chunk - 1, batch) if forward else (kind, chunk + 1, batch)
                if (chunk == 0 if forward else chunk == pipeline.stages - 1) or before in done:
                    left[rank] = chunks[chunk].forward if forward else chunks[chunk].backward
        speed = min(ranks_per_core, pipeline.stages / len(left))
        shortest = min(left.values())
        passed += shortest / speed
        for rank in list(left):
            left[rank] -= shortest
            if left[rank] <= 1e-12:
                del left[rank]
                action = queues[rank].pop(0)
                done.add((action.kind, action.chunk, action.micro_batch))
    return passed


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(2, 4),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=4, max_size=4),
    st.floats(1.0, 4.0),
)
def test_no_simulated_step_is_shorter(
    schedule: str, stages: int, extra: int, seconds: list[tuple[float, float]], ranks_per_core: float
) -> None:
    pipeline, micro_batches = Pipeline(stages, 1, schedule), stages + extra
    chunks = [ChunkSeconds(*each) for each in seconds[:stages]]
    clocks = run_schedule(pipeline, micro_batches, chunks)
    end = max(rank.end_seconds for rank in clocks)
    expected = shared_core_factor(clocks, ranks_per_core) * end
    made = simulated_seconds(pipeline, micro_batches, chunks, ranks_per_core)
    assert expected * (1 - 1e-9) <= made <= end * (1 + 1e-9)
    if ranks_per_core >= stages:  # a core for all of them: nothing is lost while one of them works
        assert made == pytest.approx(expected)


def test_ranks_with_cores_of_their_own_are_as_they_were() -> None:
    clocks = (RankSeconds(3.0, 4.0), RankSeconds(1.0, 4.0))
    assert shared_core_factor(clocks, 1.0) == 1.0
    assert shared_core_factor(clocks, 1.5) == pytest.approx(1 / 1.5)
    assert shared_core_factor(clocks, 4.0) == pytest.approx(0.5)
