"""Schedules that are known for a task, as orders of its actions, and when their actions start."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import BACKWARD, FORWARD, WEIGHT, Schedule
from autopar.schedules.list_builders import schedule_names
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.placement import stage_of_chunks
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
