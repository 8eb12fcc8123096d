"""Schedules against closed forms, torch's own schedules, and a clock that ticks; stages against published layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.processor_seconds import processor_seconds

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.pipeline_clock import chunks_in_flight, micro_batches_in_flight, run_schedule
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.errors import PlanError
from autopar.ir.pipeline.chunk_calls import chunk_calls
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Action
from autopar.schedules.check import most_in_flight as most_pairs_in_flight
from autopar.schedules.clock import ChunkSeconds
from autopar.schedules.pipeline_schedule import builder_named, chunks_of_stages, schedule_names, schedule_of, stage_of_chunks


def actions(pipeline: Pipeline, stage: int, micro_batches: int) -> tuple[Action, ...]:
    return schedule_of(pipeline, micro_batches).ranks[stage]


def most_in_flight(pipeline: Pipeline, stage: int, micro_batches: int) -> int:
    """(chunk, micro-batch) pairs."""
    return most_pairs_in_flight(actions(pipeline, stage, micro_batches))


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
    assert found == pytest.approx(ideal * (1 + (stages - 1) / (virtual * micro)))


def ticking(pipeline: Pipeline, micro: int, seconds: list[dict[str, int]], sends: list[int]) -> list[int]:
    """Tick by tick: a stage takes its next action as soon as what it needs has been there for the transfer's ticks."""
    last, stages, where = pipeline.stages * pipeline.virtual - 1, range(pipeline.stages), stage_of_chunks(pipeline)
    orders = [list(actions(pipeline, stage, micro)) for stage in stages]
    done: dict[tuple[int, str, int], int] = {}
    running: list[Any] = [None for _ in stages]
    ends, clock = [0 for _ in stages], 0
    free: dict[tuple[int, int], int] = {}

    def needs(action: Any) -> tuple[int, str, int] | None:
        if action.kind == "W" or (action.kind != "F" and action.chunk == last):
            return action.chunk, "I" if action.kind == "W" else "F", action.micro_batch
        other = action.chunk + (-1 if action.kind == "F" else 1)
        return None if other < 0 else (other, "F" if action.kind == "F" else "I", action.micro_batch)

    def arrives(action: Any) -> int:
        """When the result is where it is needed; what one stage sends to another one goes one after the other."""
        to = action.chunk + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= to <= last or where[to] == where[action.chunk]:
            return clock
        channel = where[action.chunk], where[to]
        free[channel] = max(clock, free.get(channel, 0)) + sends[min(to, action.chunk)]
        return free[channel]

    while any(orders) or any(running):
        for stage in stages:
            if running[stage] and running[stage][1] == clock:
                action = running[stage][0]
                done[action.chunk, "I" if action.kind == "B" else action.kind, action.micro_batch] = arrives(action)
                ends[stage], running[stage] = clock, None
        for stage in stages:
            if running[stage] is None and orders[stage]:
                need = needs(orders[stage][0])
                own = need is not None and (orders[stage][0].kind == "W" or where[need[0]] == stage)
                if need is None or (need in done and (own or done[need] <= clock)):
                    action = orders[stage].pop(0)
                    running[stage] = action, clock + seconds[action.chunk][action.kind]
        clock += 1
        assert clock < 9000
    return ends


def drawn(data: st.DataObject, pipeline: Pipeline, most: int) -> tuple[list[dict[str, int]], list[ChunkSeconds], list[int]]:
    """Ticks of each chunk and kind, as `ChunkSeconds` too, and those of the sends."""
    many, ticks = pipeline.stages * pipeline.virtual, st.integers(1, most)
    seconds = []
    for _ in range(many):
        forward, inputs, weights = data.draw(ticks), data.draw(ticks), data.draw(ticks)
        seconds.append({"F": forward, "B": inputs + weights, "I": inputs, "W": weights})
    chunks = [
        ChunkSeconds(float(each["F"]), float(each["B"]), input_backward=float(each["I"]), weight_backward=float(each["W"]))
        for each in seconds
    ]
    return seconds, chunks, data.draw(st.lists(ticks, min_size=many - 1, max_size=many - 1))


def some_pipeline(data: st.DataObject, stages: int) -> Pipeline:
    name = data.draw(st.sampled_from(schedule_names()))
    return Pipeline(data.draw(st.integers(1, stages)), 2 if builder_named(name).v_shaped else data.draw(st.integers(1, 3)), name)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_clock_is_the_ticking_one(data: st.DataObject) -> None:
    pipeline = some_pipeline(data, 4)
    least = 2 * pipeline.stages if pipeline.schedule == "dualpipev" else 1
    micro = data.draw(st.integers(least, least + 9))
    seconds, chunks, sends = drawn(data, pipeline, 5)
    found = run_schedule(pipeline, micro, chunks, [float(each) for each in sends])
    assert [stage.end_seconds for stage in found] == ticking(pipeline, micro, seconds, sends)
    for stage, clock in enumerate(found):
        assert clock.busy_seconds == micro * sum(seconds[c]["F"] + seconds[c]["B"] for c in chunks_of_stages(pipeline)[stage])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_long_schedules_are_extrapolated_exactly(data: st.DataObject) -> None:
    """Against the schedule of the same order walked action by action, here by the ticking clock."""
    pipeline = some_pipeline(data, 3)
    micro = pipeline.stages * data.draw(st.integers(10, 14)) + data.draw(st.integers(0, pipeline.stages - 1))
    seconds, chunks, sends = drawn(data, pipeline, 3)
    found = run_schedule(pipeline, micro, chunks, [float(each) for each in sends])
    assert [stage.end_seconds for stage in found] == pytest.approx(ticking(pipeline, micro, seconds, sends))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_holding_is_that_of_the_whole_order(data: st.DataObject) -> None:
    """Many micro-batches hold what some do; here all of them are counted."""
    pipeline = some_pipeline(data, 4)
    micro = pipeline.stages * data.draw(st.integers(2, 12)) + data.draw(st.integers(0, pipeline.stages - 1))
    for stage in range(pipeline.stages):
        mine = chunks_of_stages(pipeline)[stage]
        sizes = {chunk: data.draw(st.integers(1, 9)) for chunk in mine}
        late = {chunk: data.draw(st.integers(0, sizes[chunk])) for chunk in mine}
        alive: dict[tuple[int, int], int] = {}
        most_bytes = most_pairs = 0
        for action in actions(pipeline, stage, micro):
            key = action.chunk, action.micro_batch
            if action.kind in "FI":
                alive[key] = (sizes if action.kind == "F" else late)[action.chunk]
            else:
                del alive[key]
            most_bytes, most_pairs = max(most_bytes, sum(alive.values())), max(most_pairs, len(alive))
        found = chunks_in_flight(pipeline, stage, micro, list(sizes.values()), [each or 1e-30 for each in late.values()])
        total = sum(each.whole * sizes[chunk] + each.deferred * late[chunk] for chunk, each in zip(mine, found, strict=True))
        assert total == pytest.approx(most_bytes) and most_in_flight(pipeline, stage, micro) == most_pairs


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_warmup_forwards_are_megatrons(stages: int, virtual: int) -> None:
    """arXiv 2104.04473, section 2.2: p - s - 1 forwards before the first backward; interleaved 2 (p - s - 1) + (v - 1) p."""
    for rounds in (1, 2, 4):
        for stage in range(stages):
            micro = stages * rounds
            after = stages - stage - 1
            ahead = after if virtual == 1 else 2 * after + (virtual - 1) * stages
            assert most_in_flight(Pipeline(stages, virtual), stage, micro) == min(micro * virtual, ahead + 1)


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
    llama = chunk_calls(graph_of(126), Pipeline(16))
    assert [len(chunk) for chunk in llama] == [8, *[8] * 14, 8]  # 7 layers and the embedding; 7 and the head
    assert [len(chunk) for chunk in chunk_calls(graph_of(32), Pipeline(4, 2))] == [5, 4, 4, 4, 4, 4, 4, 5]
    assert chunk_calls(graph_of(5, parts=2), Pipeline(2)) == ((0, 1, 2, 3, 4, 5, 6), (7, 8, 9, 10, 11))
    assert chunk_calls(graph_of(1), Pipeline()) == ((0, 1, 2),)
    with pytest.raises(PlanError, match="3 layers"):
        chunk_calls(graph_of(3), Pipeline(6))


def test_embedding_and_head_are_chunks_where_layers_lack() -> None:
    """Qwen3-235B as Megatron runs it: 94 layers, the embedding and the head on 32 stages of 3 chunks."""
    qwen = chunk_calls(graph_of(94), Pipeline(32, 3))
    assert qwen == tuple((index,) for index in range(96))
    assert chunk_calls(graph_of(3), Pipeline(4)) == ((0, 1), (2,), (3,), (4,))  # the head first, which is more work
    assert chunk_calls(graph_of(2, before=2, after=2, parts=2), Pipeline(4)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert chunk_calls(graph_of(3, after=0), Pipeline(4)) == ((0,), (1,), (2,), (3,))
    for before, after, stages in [(1, 1, 6), (0, 1, 5), (1, 0, 5), (0, 0, 4)]:
        with pytest.raises(PlanError, match="3 layers"):
            chunk_calls(graph_of(3, before, after), Pipeline(stages))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_every_call_is_in_one_chunk_in_order(layers: int, stages: int, virtual: int, before: int, after: int) -> None:
    graph = graph_of(layers, before, after)
    if layers >= 2 and stages * virtual <= layers + bool(before) + bool(after):
        chunks = chunk_calls(graph, Pipeline(stages, virtual))
        assert [index for chunk in chunks for index in chunk] == list(range(len(graph.calls)))
        assert all(chunks)
        own = [sum(before <= index < before + layers for index in chunk) for chunk in chunks]
        assert max(own) - min(own) <= 1 and len(chunks) == stages * virtual
        assert own[-1] == min(own) or (not after and stages * virtual > layers)


def test_unknown_schedules_are_refused() -> None:
    with pytest.raises(PlanError, match="no schedule"):
        actions(Pipeline(4, 1, "zigzag"), 0, 8)


def test_part_of_a_cluster() -> None:
    whole = Cluster.parse("dgx-h100:4")
    assert stage_cluster(whole, 4).size == 8 and stage_cluster(whole, 1) is whole and stage_cluster(whole, 2).links == whole.links
    with pytest.raises(PlanError, match="5 pipeline stages"):
        stage_cluster(whole, 5)


def test_a_thousand_micro_batches_in_ten_milliseconds() -> None:
    pipeline, chunks = Pipeline(16), [ChunkSeconds(1.0, 2.0)] * 16
    run_schedule(pipeline, 1024, chunks)
    assert processor_seconds(lambda: run_schedule(pipeline, 1024, chunks, [0.1] * 15), 3) < 0.02


def test_interleaved_last_stage_holds_its_last_chunk_once() -> None:
    """4 stages of 8 chunks: 28 forwards run ahead on the last stage, four of each chunk but the last."""
    pipeline = Pipeline(4, 8)
    assert micro_batches_in_flight(pipeline, 3, 4, [1.0] * 8) == (4,) * 7 + (1,)
    assert micro_batches_in_flight(Pipeline(4, 1), 0, 8, [1.0]) == (4,)
    for stage in range(4):
        assert sum(micro_batches_in_flight(pipeline, stage, 16, [1.0] * 8)) == most_in_flight(pipeline, stage, 16)
