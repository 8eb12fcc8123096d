"""Schedules that are known for a task, as orders of its actions, and when their actions start; and, of any schedule, backwards in
two parts beside each other made whole again where nothing waits longer for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.pipeline_schedule import schedule_names, schedule_of, stage_of_chunks
from autopar.schedules.synthesis.task import BACKWARDS, FORWARDS, WEIGHTS, Order, Task


def known_orders(task: Task) -> Iterator[tuple[str, Order]]:
    """Yield the orders of builders of this placement that have room, and one micro-batch after the other."""
    ranks, many = task.ranks, task.micro_batches
    virtual = len(task.rank_of) // ranks
    for name in schedule_names():
        pipeline = Pipeline(ranks, virtual, name)
        if ranks * virtual != len(task.rank_of):
            continue
        try:
            schedule = schedule_of(pipeline, many)
        except PlanError:
            continue
        if stage_of_chunks(pipeline) != task.rank_of or (schedule.splits_backward and not task.split):
            continue
        if all(task.fits(actions, rank) for rank, actions in enumerate(schedule.ranks)):
            yield name, tuple(tuple(_numbers(task, schedule, rank)) for rank in range(ranks))
    order = tuple(tuple(_one_by_one(task, rank)) for rank in range(ranks))
    if all(task.fits(actions, rank) for rank, actions in enumerate(task.schedule("naive", order).ranks)):
        yield "naive", order


def _numbers(task: Task, schedule: Schedule, rank: int) -> Iterator[tuple[int, int, int]]:
    for action in schedule.ranks[rank]:
        kind = {FORWARD: FORWARDS, WEIGHT: WEIGHTS}.get(action.kind, BACKWARDS)
        yield action.chunk, kind, action.micro_batch
        if action.kind == BACKWARD and task.split:
            yield action.chunk, WEIGHTS, action.micro_batch


def _one_by_one(task: Task, rank: int) -> Iterator[tuple[int, int, int]]:
    chunks = task.chunks_of(rank)
    for micro in range(task.micro_batches):
        yield from ((chunk, FORWARDS, micro) for chunk in chunks)
        for chunk in reversed(chunks):
            yield from ((chunk, kind, micro) for kind in task.kinds[1:])


def start_seconds(task: Task, order: Order) -> dict[tuple[int, int, int], float]:
    """Return when each action starts."""
    left = [deque(actions) for actions in order]
    free = [0.0] * task.ranks
    starts: dict[tuple[int, int, int], float] = {}
    ends: dict[tuple[int, int, int], float] = {}
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                chunk, kind, micro = actions[0]
                before = task.dependency(chunk, kind)
                at = free[rank]
                if before is not None:
                    if (before[0], before[1], micro) not in ends:
                        break
                    at = max(at, ends[before[0], before[1], micro] + before[2])
                starts[actions.popleft()] = at
                free[rank] = ends[chunk, kind, micro] = at + task.duration(chunk, kind, micro)
    return starts


_TRIES = 100
"""Schedules that are priced at most."""


def with_merged_backwards(schedule: Schedule, makespan_of: Callable[[Schedule], float]) -> Schedule:
    """Return `schedule` with as many whole backwards as its makespan allows: a whole one keeps nothing between its parts."""
    limit, left = makespan_of(schedule) * (1 + 1e-12), _TRIES
    merged: set[tuple[int, int]] = set()

    def take(places: Sequence[tuple[int, int]]) -> None:
        """Merge all of these places, or what goes of each half."""
        nonlocal left, merged
        if not places or not left:
            return
        left -= 1
        if makespan_of(_with(schedule, merged | set(places))) <= limit:
            merged |= set(places)
        elif len(places) > 1:
            take(places[: len(places) // 2])
            take(places[len(places) // 2 :])

    take(
        [
            (rank, cell)
            for rank, actions in enumerate(schedule.ranks)
            for cell, (one, two) in enumerate(zip(actions, actions[1:], strict=False))
            if one.kind == INPUT and two == Action(one.chunk, WEIGHT, one.micro_batch)
        ]
    )
    return _with(schedule, merged)


def _with(schedule: Schedule, places: set[tuple[int, int]]) -> Schedule:
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        line = []
        for cell, action in enumerate(actions):
            if (rank, cell) in places:
                line.append(Action(action.chunk, BACKWARD, action.micro_batch))
            elif (rank, cell - 1) not in places:
                line.append(action)
        ranks.append(tuple(line))
    return Schedule(schedule.name, tuple(ranks))
