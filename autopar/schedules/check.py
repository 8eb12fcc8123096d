"""The check of a schedule: every action once, forwards before backwards, no deadlock, and how much is in flight."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.in_flight import most_in_flight
from autopar.schedules.order import dependency_of, topological_order

_SHOWN_CELLS = 3
"""Cells that an error shows on each side."""


def check(schedule: Schedule, limits: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the peak of (chunk, micro-batch) pairs in flight on each rank, from F to B or W. PlanError marks the faulty cell: an
    action twice or missing, one before what it needs, a chunk on two ranks, a deadlock, more than `limits` in flight."""
    compute = schedule.compute
    if not all(compute.ranks):
        raise PlanError(f"schedule {schedule.name}: rank {compute.ranks.index(())} has nothing to do")
    rank_of = compute.rank_of
    for rank, actions in enumerate(compute.ranks):
        _order(compute, rank, actions)
    for chunk, rank in enumerate(rank_of):
        there = {each.micro_batch for each in compute.ranks[rank] if each.chunk == chunk and each.kind == FORWARD}
        missing = [micro for micro in range(compute.micro_batches) if micro not in there]
        if missing:
            raise PlanError(f"schedule {schedule.name}, rank {rank}: no {Action(chunk, FORWARD, missing[0])}")
    _no_deadlock(compute)
    most = tuple(most_in_flight(actions) for actions in compute.ranks)
    for rank, (held, limit) in enumerate(zip(most, limits, strict=False)):
        if held > limit:
            cells = range(len(compute.ranks[rank]))
            cell = next(cell for cell in cells if most_in_flight(compute.ranks[rank][: cell + 1]) > limit)
            raise PlanError(f"{_at(compute, rank, cell)} is one more micro-batch than the {limit} that fit")
    return most


def _order(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Check that each action is there once, F before B or I, I before W."""
    seen: dict[Action, int] = {}
    for cell, action in enumerate(actions):
        chunk, kind, micro = action.chunk, action.kind, action.micro_batch
        other = {BACKWARD: (INPUT, WEIGHT), INPUT: (BACKWARD,), WEIGHT: (BACKWARD,), FORWARD: ()}[kind]
        if action in seen or any(Action(chunk, each, micro) in seen for each in other):
            raise PlanError(f"{_at(schedule, rank, cell)} is there twice")
        first = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(kind)
        if first and Action(chunk, first, micro) not in seen:
            raise PlanError(f"{_at(schedule, rank, cell)} comes before {Action(chunk, first, micro)}")
        seen[action] = cell
    for action, cell in seen.items():
        followers = {FORWARD: (BACKWARD, INPUT), INPUT: (WEIGHT,)}.get(action.kind, ())
        if followers and not any(Action(action.chunk, kind, action.micro_batch) in seen for kind in followers):
            missing = " or ".join(str(Action(action.chunk, kind, action.micro_batch)) for kind in followers)
            raise PlanError(f"{_at(schedule, rank, cell)} has no {missing}")


def _no_deadlock(schedule: Schedule) -> None:
    stuck = topological_order(schedule).stuck
    if not stuck:
        return
    waiting = []
    for rank, cell in stuck:
        action = schedule.ranks[rank][cell]
        chunk, kind = dependency_of(action.chunk, action.kind, schedule.chunks) or (action.chunk, action.kind)
        there = {str(each) for actions in schedule.ranks for each in actions}
        waits = next(
            (text for each in (kind, INPUT) if (text := f"{chunk}{each}{action.micro_batch}") in there),
            f"{chunk}{kind}{action.micro_batch}",
        )
        waiting.append(f"rank {rank} waits for {waits} ({_mark_cell(schedule.ranks[rank], cell)})")
    raise PlanError(f"schedule {schedule.name} has a deadlock: {'; '.join(waiting)}")


def _at(schedule: Schedule, rank: int, cell: int) -> str:
    return f"schedule {schedule.name}, rank {rank}, cell {cell}: {_mark_cell(schedule.ranks[rank], cell)}: " + str(
        schedule.ranks[rank][cell]
    )


def _mark_cell(actions: Sequence[Action], cell: int) -> str:
    """Return ``0F0 >>0B1<< 0F1``, with a few cells around it."""
    first, last = max(0, cell - _SHOWN_CELLS), min(len(actions), cell + _SHOWN_CELLS + 1)
    words = [f">>{actions[at]}<<" if at == cell else str(actions[at]) for at in range(first, last)]
    return " ".join([*["..."] * (first > 0), *words, *["..."] * (last < len(actions))])
