"""Schedules against closed forms, torch's own schedules, and a clock that ticks; stages against published layouts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.formulas import formula
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.pipeline import ChunkSeconds, actions, chunks_of, held, in_flight, part_of, run_schedule, stage_calls
from autopar.errors import PlanError
from autopar.ir.plan import Pipeline


def makespan(pipeline: Pipeline, micro_batches: int, chunks: list[ChunkSeconds], **more: Any) -> float:
    return max(stage.end_seconds for stage in run_schedule(pipeline, micro_batches, chunks, **more))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5, 33])
def test_bubble_is_the_closed_form(schedule: str, virtual: int, stages: int, rounds: int) -> None:
    """arXiv 2104.04473, section 2.2: the bubble is (p - 1) / (v m) of the ideal time."""
    pipeline, micro = Pipeline(stages, virtual, schedule), rounds * stages
    ideal = micro * virtual * (1.0 + 2.0)
    found = makespan(pipeline, micro, [ChunkSeconds(1.0, 2.0)] * (stages * virtual))
    bubble = formula("pipeline.bubble").value({"p": stages, "v": virtual, "m": micro})
    assert found == pytest.approx(ideal * (1 + bubble)) == pytest.approx(ideal * (1 + (stages - 1) / (virtual * micro)))


def ticking(pipeline: Pipeline, micro: int, forward: list[int], backward: list[int], sends: list[int]) -> list[int]:
    """Tick by tick: a stage takes its next action as soon as what it needs has been there for the transfer's ticks."""
    last, stages = len(forward) - 1, range(pipeline.stages)
    orders = [list(actions(pipeline, stage, micro)) for stage in stages]
    done: dict[tuple[int, int, bool], int] = {}
    running: list[Any] = [None for _ in stages]
    ends, clock = [0 for _ in stages], 0

    def needs(action: Any) -> tuple[tuple[int, int, bool], int] | None:
        if action.backward:
            return ((action.chunk, action.micro_batch, False), 0) if action.chunk == last else (
                (action.chunk + 1, action.micro_batch, True), sends[action.chunk])  # fmt: skip
        return ((action.chunk - 1, action.micro_batch, False), sends[action.chunk - 1]) if action.chunk else None

    while any(orders) or any(running):
        for stage in stages:
            if running[stage] and running[stage][1] == clock:
                action = running[stage][0]
                done[action.chunk, action.micro_batch, action.backward] = ends[stage] = clock
                running[stage] = None
        for stage in stages:
            if running[stage] is None and orders[stage]:
                need = needs(orders[stage][0])
                if need is None or (need[0] in done and done[need[0]] + need[1] <= clock):
                    action = orders[stage].pop(0)
                    running[stage] = action, clock + (backward if action.backward else forward)[action.chunk]
        clock += 1
        assert clock < 5000
    return ends


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_clock_is_the_ticking_one(data: st.DataObject) -> None:
    stages, virtual = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    micro = data.draw(st.integers(1, 9)) if virtual == 1 else stages * data.draw(st.integers(1, 3))
    pipeline = Pipeline(stages, virtual, data.draw(st.sampled_from(["1f1b", "gpipe"])))
    some = st.lists(st.integers(1, 5), min_size=stages * virtual, max_size=stages * virtual)
    forward, backward, sends = data.draw(some), data.draw(some), data.draw(some)
    chunks = [ChunkSeconds(float(f), float(b)) for f, b in zip(forward, backward, strict=True)]
    found = run_schedule(pipeline, micro, chunks, [float(each) for each in sends[:-1]])
    assert [stage.end_seconds for stage in found] == ticking(pipeline, micro, forward, backward, sends)
    for stage, seconds in enumerate(found):
        assert seconds.busy_seconds == micro * sum(forward[c] + backward[c] for c in chunks_of(pipeline, stage))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_long_schedules_are_extrapolated_exactly(data: st.DataObject) -> None:
    """Against the schedule of the same order walked action by action, here by the ticking clock."""
    stages, virtual = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    pipeline, micro = Pipeline(stages, virtual), stages * data.draw(st.integers(10, 14))
    some = st.lists(st.integers(1, 4), min_size=stages * virtual, max_size=stages * virtual)
    forward, backward, sends = data.draw(some), data.draw(some), data.draw(some)
    chunks = [ChunkSeconds(float(f), float(b)) for f, b in zip(forward, backward, strict=True)]
    found = run_schedule(pipeline, micro, chunks, [float(each) for each in sends[:-1]])
    assert [stage.end_seconds for stage in found] == pytest.approx(ticking(pipeline, micro, forward, backward, sends))


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(4, 1, "gpipe"), Pipeline(4, 2), Pipeline(3, 4), Pipeline(1)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_in_flight_is_what_the_order_holds(pipeline: Pipeline, rounds: int) -> None:
    for micro in (1, pipeline.stages * rounds):
        for stage in range(pipeline.stages):
            held = [sum(-1 if each.backward else 1 for each in actions(pipeline, stage, micro)[: n + 1]) for n in range(999)]
            assert max(held) == in_flight(pipeline, stage, micro)


def test_orders_are_torchs() -> None:
    """`ScheduleInterleaved1F1B` of torch.distributed.pipelining writes the same actions."""
    from torch.distributed.pipelining import schedules

    for stages, virtual, micro in [(4, 2, 8), (2, 3, 6), (4, 4, 4)]:
        fake = SimpleNamespace(
            pp_group_size=stages, n_local_stages=virtual, _n_microbatches=micro, number_of_rounds=max(1, micro // stages)
        )
        fake.microbatches_per_round = micro // fake.number_of_rounds
        for stage in range(stages):
            theirs = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(fake, stage)
            said = [str(action) for action in theirs if action is not None]
            assert [str(action) for action in actions(Pipeline(stages, virtual), stage, micro)] == said


def test_sends_that_block_keep_the_stage_busy() -> None:
    chunks = [ChunkSeconds(1.0, 2.0)] * 4
    free = makespan(Pipeline(4), 8, chunks, transfer_seconds=[0.5] * 3)
    assert makespan(Pipeline(4), 8, chunks, transfer_seconds=[0.5] * 3, blocking=True) > free > makespan(Pipeline(4), 8, chunks)


def test_first_and_last_micro_batch_may_differ() -> None:
    chunk = ChunkSeconds(1.0, 2.0, first_forward=4.0, last_backward=7.0)
    assert makespan(Pipeline(), 1, [chunk]) == 11.0
    assert makespan(Pipeline(), 3, [chunk]) == 4 + 2 + 1 + 2 + 1 + 7
    assert makespan(Pipeline(), 99, [chunk]) == 4 + 98 * 3 + 7


def graph_of(layers: int, before: int = 1, after: int = 1, parts: int = 1) -> Any:
    prefixes = [""] * before + [f"model.layers.{i}" + (f".part{k}" if k else "") for i in range(layers) for k in range(parts)]
    return SimpleNamespace(name="model", calls=[SimpleNamespace(prefix=prefix) for prefix in (*prefixes, *[""] * after)])


def test_layers_are_dealt_evenly() -> None:
    llama = stage_calls(graph_of(126), Pipeline(16))
    assert [len(chunk) for chunk in llama] == [8, *[8] * 14, 8]  # 7 layers and the embedding; 7 and the head
    assert [len(chunk) for chunk in stage_calls(graph_of(32), Pipeline(4, 2))] == [5, 4, 4, 4, 4, 4, 4, 5]
    assert stage_calls(graph_of(5, parts=2), Pipeline(2)) == ((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11))
    assert stage_calls(graph_of(1), Pipeline()) == ((0, 1, 2),)
    with pytest.raises(PlanError, match="3 layers"):
        stage_calls(graph_of(3), Pipeline(6))


def test_embedding_and_head_are_chunks_where_layers_lack() -> None:
    """Qwen3-235B as Megatron runs it: 94 layers, the embedding and the head on 32 stages of 3 chunks."""
    qwen = stage_calls(graph_of(94), Pipeline(32, 3))
    assert qwen == tuple((index,) for index in range(96))
    assert stage_calls(graph_of(3), Pipeline(4)) == ((0, 1), (2,), (3,), (4,))  # the head first, which is more work
    assert stage_calls(graph_of(2, before=2, after=2, parts=2), Pipeline(4)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert stage_calls(graph_of(3, after=0), Pipeline(4)) == ((0,), (1,), (2,), (3,))
    for before, after, stages in [(1, 1, 6), (0, 1, 5), (1, 0, 5), (0, 0, 4)]:
        with pytest.raises(PlanError, match="3 layers"):
            stage_calls(graph_of(3, before, after), Pipeline(stages))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_every_call_is_in_one_chunk_in_order(layers: int, stages: int, virtual: int, before: int, after: int) -> None:
    graph = graph_of(layers, before, after)
    if layers >= 2 and stages * virtual <= layers + bool(before) + bool(after):
        chunks = stage_calls(graph, Pipeline(stages, virtual))
        assert [index for chunk in chunks for index in chunk] == list(range(len(graph.calls)))
        assert all(chunks)
        own = [sum(before <= index < before + layers for index in chunk) for chunk in chunks]
        assert max(own) - min(own) <= 1 and len(chunks) == stages * virtual
        assert own[-1] == min(own) or (not after and stages * virtual > layers)


def test_uneven_groups_are_refused() -> None:
    with pytest.raises(PlanError, match="multiple of 4"):
        actions(Pipeline(4, 2), 0, 6)
    with pytest.raises(PlanError, match="no schedule"):
        actions(Pipeline(4, 1, "zigzag"), 0, 8)


def test_part_of_a_cluster() -> None:
    whole = Cluster.parse("dgx-h100:4")
    assert part_of(whole, 4).size == 8 and part_of(whole, 1) is whole and part_of(whole, 2).links == whole.links
    with pytest.raises(PlanError, match="5 pipeline stages"):
        part_of(whole, 5)


def test_a_thousand_micro_batches_in_ten_milliseconds() -> None:
    pipeline, chunks = Pipeline(16), [ChunkSeconds(1.0, 2.0)] * 16
    run_schedule(pipeline, 1024, chunks)
    start = time.process_time()
    run_schedule(pipeline, 1024, chunks, [0.1] * 15)
    assert time.process_time() - start < 0.02


def test_interleaved_last_stage_holds_its_last_chunk_once() -> None:
    """4 stages of 8 chunks: 28 forwards run ahead on the last stage, four of each chunk but the last."""
    pipeline = Pipeline(4, 8)
    assert held(pipeline, 3, 4, [1.0] * 8) == (4,) * 7 + (1,)
    assert held(Pipeline(4, 1), 0, 8, [1.0]) == (4,)
    for stage in range(4):
        assert sum(held(pipeline, stage, 16, [1.0] * 8)) == in_flight(pipeline, stage, 16)
