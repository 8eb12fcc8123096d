"""Synthesised schedules against every schedule of tiny cases, and against the builders."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import Infeasible, PlanError
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Action, Schedule
from autopar.schedules.check import check, peak_in_flight
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_names, schedule_of, stage_of_chunks
from autopar.schedules.synthesis.greedy import initial_rules, simulate_rules
from autopar.schedules.synthesis.known_orders import with_merged_backwards
from autopar.schedules.synthesis.makespan_bound import makespan_lower_bound
from autopar.schedules.synthesis.task import MemoryLimits, Task
from autopar.solve.ilp.linear_model import Status
from autopar.solve.pipeline.synthesize import Synthesis, synthesize

Key = tuple[int, int, int]


def best_of_all(task: Task) -> float:
    """The least makespan, by trying every order of actions that begin one after the other, each as early as it can. Micro-batches
    in any order: nothing here knows that they may stay in theirs."""
    kinds = (0, 1, 2) if task.split else (0, 1)
    chunks, many = len(task.rank_of), task.micro_batches
    total = chunks * many * len(kinds)
    best = float("inf")
    remaining = [task.busy_seconds(rank) for rank in range(task.ranks)]

    def need(key: Key) -> tuple[Key, float] | None:
        chunk, kind, micro = key
        if kind == 2:
            return (chunk, 1, micro), 0.0
        if kind == 0:
            return ((chunk - 1, 0, micro), task.lags[chunk - 1]) if chunk else None
        return ((chunk + 1, 1, micro), task.lags[chunk]) if chunk + 1 < chunks else ((chunk, 0, micro), 0.0)

    def place(ends: dict[Key, float], free: list[float], used: list[float], left: list[float], floor: float) -> None:
        nonlocal best
        if len(ends) == total:
            best = min(best, max(ends.values()))
            return
        if max(a + b for a, b in zip(free, left, strict=True)) >= best - 1e-9:
            return
        for chunk in range(chunks):
            rank = task.rank_of[chunk]
            for kind in kinds:
                for micro in range(many):
                    key = chunk, kind, micro
                    wanted = need(key)
                    if key in ends or (wanted and wanted[0] not in ends):
                        continue
                    grown = {
                        0: task.saved[chunk],
                        1: -task.saved[chunk] + (task.deferred[chunk] if task.split else 0),
                        2: -task.deferred[chunk],
                    }
                    if kind == 0 and used[rank] + task.saved[chunk] > task.limit[rank] + 1e-9:
                        continue
                    start = max(free[rank], ends[wanted[0]] + wanted[1] if wanted else 0.0)
                    if start < floor - 1e-9:
                        continue  # this order is tried with the earlier action first
                    seconds = task.seconds[chunk][kind]
                    old_free, old_used, old_left = free[rank], used[rank], left[rank]
                    ends[key] = free[rank] = start + seconds
                    used[rank], left[rank] = old_used + grown[kind], old_left - seconds
                    place(ends, free, used, left, start)
                    free[rank], used[rank], left[rank] = old_free, old_used, old_left
                    del ends[key]

    place({}, [0.0] * task.ranks, [0.0] * task.ranks, remaining, 0.0)
    return best


def uneven(data: st.DataObject, many: int) -> list[ChunkSeconds]:
    parts = [tuple(data.draw(st.integers(least, 4)) for least in (1, 0, 0)) for _ in range(many)]
    return [ChunkSeconds(float(f), float(i + w), input_backward=float(i), weight_backward=float(w)) for f, i, w in parts]


SHAPES = [
    ((0, 1), 2, True),
    ((0, 1), 3, False),
    ((0, 1, 2), 2, False),
    ((0, 1, 1, 0), 2, False),
    ((0, 1, 0, 1), 2, False),
    ((0,), 3, True),
]


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_nothing_is_better_than_what_is_proven(data: st.DataObject) -> None:
    rank_of, micro, split = data.draw(st.sampled_from(SHAPES))
    chunks = uneven(data, len(rank_of))
    lags = [float(data.draw(st.integers(0, 2))) for _ in chunks[1:]]
    own = [rank_of.count(rank) for rank in range(max(rank_of) + 1)]
    limits = tuple(float(data.draw(st.integers(few, few * micro))) for few in own)
    late = tuple(data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in chunks)
    room = MemoryLimits((1.0,) * len(chunks), limits, late)
    task = Task.of(chunks, rank_of, micro, lags, memory=room, split=split)
    exact = best_of_all(task)
    assert makespan_lower_bound(task) <= exact + 1e-9
    for rules in initial_rules(task)[:8]:
        assert simulate_rules(task, rules)[0] >= exact - 1e-9
    found = synthesize(chunks, rank_of, micro, lags, memory=room, split_backward=split, effort=3.0)
    shortest = min(min(task.seconds[chunk][:2]) for chunk in range(len(rank_of)))
    if max(task.lags, default=0.0) <= shortest:
        assert found.status is Status.OPTIMAL and found.makespan_seconds == pytest.approx(exact, rel=1e-3)
    else:  # sends may wait for each other, which the clock counts and the bound (and `exact`) does not
        assert found.makespan_seconds >= exact - 1e-6
        assert (found.status is Status.OPTIMAL) == (found.makespan_seconds <= found.lower_bound_seconds * 1.001)
    assert exact >= found.lower_bound_seconds - 1e-6
    fits(found.schedule, rank_of, room, split)


@pytest.mark.parametrize("limit", [3.2, 6.2])
def test_weight_gradients_may_read_more_than_is_saved(limit: float) -> None:
    """Where much is recomputed; the builders' whole backwards fit, which the parts of theirs would not. CP-SAT ended the process
    on a model that no order satisfied (OR-tools 9.15)."""
    chunks = [parts(1.0, 1.4, 0.9), parts(1.3, 1.1, 1.2), parts(0.8, 1.6, 1.0), parts(1.1, 1.2, 0.7)]
    room = MemoryLimits((1.0, 1.3, 1.0, 1.3), (limit, limit), (2.5, 3.25, 2.5, 3.25))
    found = synthesize(chunks, (0, 1, 0, 1), 4, memory=room, split_backward=True, effort=1.0)
    assert found is not None and found.lower_bound_seconds <= found.makespan_seconds <= found.builder_seconds
    fits(found.schedule, (0, 1, 0, 1), room, True)


def fits(schedule: Schedule, rank_of: Sequence[int], room: MemoryLimits, split: bool) -> None:
    """What is held, counted as the cost models do it."""
    check(schedule)
    assert schedule.rank_of == tuple(rank_of)
    for rank, actions in enumerate(schedule.ranks):
        mine = [chunk for chunk, where in enumerate(rank_of) if where == rank]
        kept = [room.saved_bytes[chunk] for chunk in mine]
        late = [(room.deferred_bytes or room.saved_bytes)[chunk] or 1e-30 for chunk in mine]
        most = peak_in_flight(actions, mine, kept, late)
        total = sum(each.whole * k + each.deferred * w for each, k, w in zip(most, kept, late, strict=True))
        assert total <= room.limit_bytes[rank] * (1 + 1e-6)


def makespan(name: str, virtual: int, chunks: list[ChunkSeconds], micro: int, transfers: Sequence[float] = ()) -> float:
    pipeline = Pipeline(len(chunks) // virtual, virtual, name)
    return max(rank.end_seconds for rank in ScheduleClock.of(schedule_of(pipeline, micro)).run(chunks, transfers))


def parts(forward: float, inputs: float, weights: float) -> ChunkSeconds:
    return ChunkSeconds(forward, inputs + weights, input_backward=inputs, weight_backward=weights)


def like_a_model(stages: int, virtual: int) -> list[ChunkSeconds]:
    """Layers, an embedding that costs little, and a head that costs more."""
    many = stages * virtual
    sizes = [0.8 / virtual, *[1 / virtual] * (many - 2), 1.5 / virtual]
    return [parts(size, 1.1 * size, 0.9 * size) for size in sizes]


@pytest.mark.parametrize("stages", [2, 4])
def test_uneven_stages_beat_one_forward_one_backward(stages: int) -> None:
    """With the room of 1F1B, and with that of interleaved 1F1B."""
    micro, transfers = 2 * stages, [0.05] * (2 * stages - 1)
    chunks = like_a_model(stages, 1)
    room = MemoryLimits((1.0,) * stages, (float(stages),) * stages)
    found = synthesize(chunks, range(stages), micro, transfers[: stages - 1], memory=room, split_backward=True, effort=3.0)
    assert found.makespan_seconds < 0.99 * makespan("1f1b", 1, chunks, micro, transfers[: stages - 1])
    assert found.makespan_seconds <= makespan("zb-h1", 1, chunks, micro, transfers[: stages - 1]) + 1e-9
    fits(found.schedule, range(stages), room, True)

    halves = like_a_model(stages, 2)
    pipeline = Pipeline(stages, 2)
    most = check(schedule_of(pipeline, micro))
    room = MemoryLimits((1.0,) * 2 * stages, tuple(map(float, most)))
    where = stage_of_chunks(pipeline)
    found = synthesize(halves, where, micro, transfers, memory=room, split_backward=True, effort=1.0)
    assert found.makespan_seconds < 0.99 * makespan("1f1b", 2, halves, micro, transfers)
    fits(found.schedule, where, room, True)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_never_worse_than_any_builder(data: st.DataObject) -> None:
    stages, name = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(schedule_names()))
    pipeline = Pipeline(stages, 2, name)
    micro = data.draw(st.integers(2 * stages, 2 * stages + 2))
    chunks = uneven(data, 2 * stages)
    transfers = [float(data.draw(st.integers(0, 2))) for _ in chunks[1:]]
    schedule, blocking = schedule_of(pipeline, micro), data.draw(st.booleans())
    room = MemoryLimits((1.0,) * 2 * stages, tuple(map(float, check(schedule))))
    split = schedule.splits_backward
    found = synthesize(
        chunks, schedule.rank_of, micro, transfers, memory=room, split_backward=split, blocking=blocking, effort=0.4
    )
    built = max(rank.end_seconds for rank in ScheduleClock.of(schedule).run(chunks, transfers, blocking))
    assert found.lower_bound_seconds <= found.makespan_seconds <= found.builder_seconds <= built + 1e-9
    assert found.makespan_seconds == max(
        rank.end_seconds for rank in ScheduleClock.of(found.schedule).run(chunks, transfers, blocking)
    )
    fits(found.schedule, schedule.rank_of, room, split)


def test_first_and_last_micro_batch_may_differ() -> None:
    """Gathers and reductions: the bound knows them."""
    chunks = [ChunkSeconds(1.0, 2.0, 3.0, 5.0)] * 2
    found = synthesize(chunks, (0, 1), 4, effort=2.0)
    assert found.status is Status.OPTIMAL
    assert found.makespan_seconds == max(rank.end_seconds for rank in ScheduleClock.of(found.schedule).run(chunks))


@pytest.mark.parametrize(("stages", "micro"), [(2, 5), (4, 8)])
def test_backwards_stay_whole_where_nothing_is_won(stages: int, micro: int) -> None:
    """Of 1F1B with every backward in two parts beside each other: those of the first stage, and others that none waits for."""
    plain = schedule_of(Pipeline(stages), micro)
    parts_of = {"B": ("I", "W")}
    apart = Schedule(
        "apart",
        tuple(
            tuple(Action(each.chunk, kind, each.micro_batch) for each in rank for kind in parts_of.get(each.kind, each.kind))
            for rank in plain.ranks
        ),
    )
    chunks = [parts(1.0, 1.0, 1.0)] * stages

    def makespan_of(schedule: Schedule) -> float:
        return max(rank.end_seconds for rank in ScheduleClock.of(schedule).run(chunks))

    found = with_merged_backwards(apart, makespan_of)
    check(found)
    assert makespan_of(found) == makespan_of(apart) < makespan_of(plain)
    assert found.ranks[0] == plain.ranks[0] and any(each.kind == "W" for each in found.ranks[-1])
    assert with_merged_backwards(apart, lambda schedule: 1.0) == Schedule("apart", plain.ranks)


def test_bad_input() -> None:
    one = parts(1.0, 1.0, 1.0)
    with pytest.raises(Infeasible, match="saves 2 bytes on pipeline rank 0, whose limit is 1.5"):
        synthesize([one] * 4, (0, 1, 1, 0), 2, memory=MemoryLimits((1.0,) * 4, (1.5, 9.0)))
    for arguments, said in [
        (([one], (1,), 2), "give each chunk a rank"),
        (([one] * 2, (0,), 2), "give each chunk a rank"),
        (([one] * 2, (0, 1), 2, [1.0, 2.0]), "1 transfers between them, not 2"),
    ]:
        with pytest.raises(PlanError, match=said):
            synthesize(*arguments)  # type: ignore[arg-type]
    for memory, said in [
        (MemoryLimits((1.0,), (1.0, 1.0)), "numbers of bytes"),
        (MemoryLimits((1.0, 1.0), (1.0,)), "as many limits"),
    ]:
        with pytest.raises(PlanError, match=said):
            synthesize([one] * 2, (0, 1), 2, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2])
def test_eight_stages_of_sixteen_micro_batches_take_twenty_seconds(virtual: int) -> None:
    chunks, where = like_a_model(8, virtual), stage_of_chunks(Pipeline(8, virtual, "1f1b" if virtual == 1 else "zbv"))
    room = MemoryLimits((1.0,) * 8 * virtual, (8.0 * virtual,) * 8)
    start = time.process_time()  # of both workers: the machine may be busy otherwise
    found: Synthesis = synthesize(chunks, where, 16, [0.05] * (8 * virtual - 1), memory=room, split_backward=True)
    assert time.process_time() - start < 2 * 20.0
    name = "zb-h1" if virtual == 1 else "zbv"
    assert found.makespan_seconds <= makespan(name, virtual, chunks, 16, [0.05] * (8 * virtual - 1)) + 1e-9
    assert found.makespan_seconds < 0.95 * makespan("1f1b", virtual, chunks, 16, [0.05] * (8 * virtual - 1))
    fits(found.schedule, where, room, True)
