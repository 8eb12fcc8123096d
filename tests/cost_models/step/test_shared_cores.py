"""Pipelines of ranks that share cores, against a simulation of cores that are divided evenly among the ranks at work."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.step.pipeline_clock import run_schedule
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import FORWARD
from autopar.schedules.clock import ChunkSeconds
from autopar.schedules.pipeline_schedule import schedule_of

SLICE = 0.02


def quantum_seconds(pipeline: Pipeline, micro_batches: int, chunks: list[ChunkSeconds], transfer: float, cores: int) -> float:
    """The makespan on `cores` that give each rank at work an equal slice, one after the other. A message takes `transfer`,
    whoever works, and waits for the one before it. (Chunks are stated in seconds of all ranks at work.)"""
    ranks_per_core = pipeline.stages / cores
    queues = [list(actions) for actions in schedule_of(pipeline, micro_batches).ranks]
    arrived: dict[tuple[str, int, int], float] = {}
    link = [[0.0] * pipeline.stages for _ in range(2)]
    left: dict[int, float] = {}
    passed, turn = 0.0, 0
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and rank not in left:
                kind, chunk, batch = queue[0].kind, queue[0].chunk, queue[0].micro_batch
                forward = kind == FORWARD
                before = (FORWARD, chunk - 1, batch) if forward else (kind, chunk + 1, batch)
                first = chunk == (0 if forward else pipeline.stages - 1)
                if first or arrived.get(before, inf) <= passed:
                    left[rank] = (chunks[chunk].forward if forward else chunks[chunk].backward) / ranks_per_core
        at_work = sorted(left, key=lambda rank: (rank - turn) % pipeline.stages)[:cores]
        turn = at_work[-1] + 1 if at_work else turn
        passed += SLICE
        for rank in at_work:
            left[rank] -= SLICE
            if left[rank] <= 1e-9:
                del left[rank]
                action = queues[rank].pop(0)
                way = link[action.kind == FORWARD]
                arrived[action.kind, action.chunk, action.micro_batch] = way[rank] = max(passed, way[rank]) + transfer
    return passed


CASES = (
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(2, 4),
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.1, 3.0]),
)


@settings(max_examples=15, deadline=None)
@given(*CASES, st.integers(1, 3))
def test_as_on_cores_that_take_turns(
    schedule: str, stages: int, extra: int, seconds: list[tuple[float, float]], transfer: float, cores: int
) -> None:
    pipeline, micro_batches, cores = Pipeline(stages, 1, schedule), stages + extra, min(cores, stages)
    chunks, transfers = [ChunkSeconds(*each) for each in seconds[:stages]], [transfer] * (stages - 1)
    clocks = run_schedule(pipeline, micro_batches, chunks, transfers, ranks_per_core=stages / cores)
    made = quantum_seconds(pipeline, micro_batches, chunks, transfer, cores)
    actions = 2 * micro_batches + 2 * stages  # each begins up to a slice late, and lasts up to a slice of each rank longer
    assert max(clock.end_seconds for clock in clocks) == pytest.approx(made, abs=SLICE * actions * stages, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(*CASES, st.floats(1.01, 4.0))
def test_between_all_work_and_ranks_that_do_not_share(
    schedule: str, stages: int, extra: int, seconds: list[tuple[float, float]], transfer: float, ranks_per_core: float
) -> None:
    """No shorter than all work on all cores, nor than on a core each (whose messages take as long); never longer than without
    any sharing."""
    pipeline, micro_batches = Pipeline(stages, 1, schedule), stages + extra
    chunks, transfers = [ChunkSeconds(*each) for each in seconds[:stages]], [transfer] * (stages - 1)
    faster = [ChunkSeconds(*(value / ranks_per_core for value in each)) for each in seconds[:stages]]
    clocks, alone, apart = (
        run_schedule(pipeline, micro_batches, each, transfers, ranks_per_core=shared)
        for each, shared in ((chunks, ranks_per_core), (chunks, 1.0), (faster, 1.0))
    )
    end, longest, shortest = (max(rank.end_seconds for rank in each) for each in (clocks, alone, apart))
    work = sum(rank.busy_seconds for rank in alone) / stages
    assert max(work, shortest) * (1 - 1e-9) <= end <= longest * (1 + 1e-9)
    if ranks_per_core >= stages and not transfer:  # a core for all of them: nothing is lost while one of them works
        assert end == pytest.approx(work)


def test_a_sender_that_is_blocked_leaves_its_core() -> None:
    """Two stages on one core, one micro-batch, so that one works at a time: at twice the speed."""
    pipeline, chunks = Pipeline(2, 1, "gpipe"), [ChunkSeconds(1.0, 2.0)] * 2
    for blocking in (False, True):
        clocks = run_schedule(pipeline, 1, chunks, [0.5], blocking, ranks_per_core=2.0)
        assert [clock.end_seconds for clock in clocks] == pytest.approx([4.0, 2.5])
        assert [clock.busy_seconds for clock in clocks] == pytest.approx([1.5, 1.5])


def test_what_waits_for_communication_is_not_faster_on_a_core_of_its_own() -> None:
    """Half of each action: the other half takes half of its time."""
    pipeline, chunks, waits = Pipeline(2, 1, "gpipe"), [ChunkSeconds(1.0, 2.0)] * 2, [ChunkSeconds(0.5, 1.0)] * 2
    clocks = run_schedule(pipeline, 1, chunks, [0.0], waits=waits, ranks_per_core=2.0)
    assert [clock.end_seconds for clock in clocks] == pytest.approx([4.5, 3.0])
    assert [clock.busy_seconds for clock in clocks] == pytest.approx([2.25, 2.25])
