"""Transfers against a simulation of first-in-first-out channels in which senders may block."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.plan import Pipeline
from autopar.ir.schedule import COMPUTE, Action, Schedule
from autopar.schedules.communicate import with_communication
from autopar.schedules.pipeline_schedule import builder_named, schedule_names, schedule_of

PEER = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}


def left_over(schedule: Schedule, capacity: int, random: Random) -> list[str]:
    """What ranks still have to do when all of them stand still. A channel for each ordered pair of ranks: a send waits until
    fewer than `capacity` sends before it have no receive posted (0: until its own is posted). Receives take what comes first."""
    rank_of, chunks = schedule.compute.rank_of, schedule.chunks
    todo = [deque(actions) for actions in schedule.ranks]
    sent: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    posted: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    done: set[Action] = set()

    def arrived(rank: int, peer: int, what: tuple[int, str, int]) -> bool:
        here, there = posted.get((peer, rank), []), sent.get((peer, rank), [])
        if what not in here or here.index(what) >= len(there):
            return False
        assert there[here.index(what)] == what, f"rank {rank} receives {there[here.index(what)]} as {what}"
        return True

    def can(rank: int, action: Action) -> bool:
        chunk, kind, micro = action.chunk, action.kind, action.micro_batch
        if kind in PEER:
            other = rank_of[chunk + PEER[kind]]
            assert other != rank, f"{action} is on one rank"
            if kind.startswith("RECV"):
                posted.setdefault((other, rank), []).append((chunk, kind[-1], micro))
                return True
            made = [Action(chunk, each, micro) for each in (["F"] if kind == "SEND_F" else ["B", "I"])]
            assert done & set(made), f"{action} before its action"
            there = sent.setdefault((rank, other), [])
            if len(there) - len(posted.get((rank, other), [])) >= capacity:
                return False
            there.append((chunk + PEER[kind], kind[-1], micro))
            return True
        if kind not in COMPUTE or kind == "W":
            return True
        before = chunk - 1 if kind == "F" else chunk + 1
        if not 0 <= before < chunks:
            return True
        if rank_of[before] == rank:
            return bool(done & {Action(before, each, micro) for each in (["F"] if kind == "F" else ["B", "I"])})
        return arrived(rank, rank_of[before], (chunk, "F" if kind == "F" else "B", micro))

    while True:
        ranks = [rank for rank in range(len(todo)) if todo[rank]]
        random.shuffle(ranks)
        for rank in ranks:
            if can(rank, todo[rank][0]):
                done.add(todo[rank].popleft())
                for _ in range(random.randrange(4)):
                    if not todo[rank] or not can(rank, todo[rank][0]):
                        break
                    done.add(todo[rank].popleft())
                break
        else:
            return [f"rank {rank}: {todo[rank][0]}" for rank in ranks]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages, name = draw(st.integers(1, 6)), draw(st.sampled_from(schedule_names()))
    virtual = 2 if builder_named(name).v_shaped else draw(st.integers(1, 3))
    least = 2 * stages if name == "dualpipev" else 1
    return schedule_of(Pipeline(stages, virtual, name), draw(st.integers(least, least + 14)))


def shuffled(schedule: Schedule, random: Random) -> Schedule:
    """A random schedule that can run, with the same actions: as a list of all of them in an order without waiting."""
    rank_of = schedule.rank_of
    left = [list(actions) for actions in schedule.ranks]
    ranks: list[list[Action]] = [[] for _ in left]
    done: set[tuple[int, str, int]] = set()

    def free(action: Action) -> bool:
        chunk, kind, micro = action.chunk, action.kind, action.micro_batch
        if kind == "F":
            return chunk == 0 or (chunk - 1, "F", micro) in done
        if kind == "W":
            return (chunk, "I", micro) in done
        return (chunk, "F", micro) in done and (chunk + 1 == len(rank_of) or (chunk + 1, "I", micro) in done)

    while any(left):
        rank = random.choice([rank for rank, actions in enumerate(left) if any(map(free, actions))])
        action = random.choice([each for each in left[rank] if free(each)])
        left[rank].remove(action)
        ranks[rank].append(action)
        done.add((action.chunk, "I" if action.kind == "B" else action.kind, action.micro_batch))
    return Schedule("shuffled", tuple(map(tuple, ranks)))


@given(schedules(), st.sampled_from([0, 1, 2, 10**6]), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100, deadline=None)
def test_nothing_stands_still(schedule: Schedule, capacity: int, random: Random, mixed: bool) -> None:
    """Not even where a send blocks until its receive is posted, and not for orders that nobody builds."""
    whole = with_communication(shuffled(schedule, random) if mixed else schedule)
    assert left_over(whole, capacity, random) == []


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_places(schedule: Schedule) -> None:
    whole = with_communication(schedule)
    assert whole.compute == schedule
    last, rank_of = schedule.chunks - 1, schedule.rank_of
    for rank, actions in enumerate(whole.ranks):
        place = {action: at for at, action in enumerate(actions)}
        assert len(place) == len(actions)
        for action in schedule.ranks[rank]:
            chunk, kind, micro = action.chunk, action.kind, action.micro_batch
            if kind == "W":
                continue
            way = "F" if kind == "F" else "B"
            after, before = (chunk + 1, chunk - 1) if way == "F" else (chunk - 1, chunk + 1)
            sends = 0 <= after <= last and rank_of[after] != rank
            assert place.get(Action(chunk, f"SEND_{way}", micro)) == (place[action] + 1 if sends else None)
            received = place.get(Action(chunk, f"RECV_{way}", micro))
            assert (received is not None) == (0 <= before <= last and rank_of[before] != rank)
            if received is not None:
                between = [each for each in actions[received : place[action]] if each.kind in COMPUTE]
                assert between or not any(each.kind in COMPUTE for each in actions[: place[action]])


def test_tables_that_one_can_read() -> None:
    plain = schedule_of(Pipeline(2), 2)
    assert str(with_communication(plain)).splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert str(with_communication(schedule_of(Pipeline(1, 2), 1), [3, 1])) == (
        "1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0 0REDUCE_GRAD"
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_of_the_data_axis(zero: int) -> None:
    for schedule in (schedule_of(Pipeline(3, 2), 6), schedule_of(Pipeline(3, 2, "zbv"), 7), schedule_of(Pipeline(2), 2)):
        whole = with_communication(schedule, [zero] * schedule.chunks)
        for actions in whole.ranks:
            for chunk in {action.chunk for action in actions}:
                mine = [at for at, each in enumerate(actions) if each.chunk == chunk and each.kind in COMPUTE]
                names = {each.kind: at for at, each in enumerate(actions) if each.chunk == chunk and each.micro_batch < 0}
                assert names.pop("REDUCE_GRAD") - mine[-1] in (1, 2)  # behind the send of the gradients
                if zero in (1, 2):
                    assert names.pop("UNSHARD") < mine[0] and names.pop("RESHARD") > mine[-1]
                assert not names
