"""The check of a schedule: every action once, forwards before backwards, no deadlock; the dependency of an action, and an order
of all actions in which none waits for a later one; and the micro-batches in flight, whose saved activations a stage holds, and
their peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule

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


@dataclass(frozen=True, slots=True)
class TopologicalOrder:
    """Every computing action in such an order. Per action: its `rank` and `cell` there, and what it waits for (`after`, an index
    into this order; -1: nothing) over which cut (`cut`: c between chunks c and c + 1; -1 on one rank).

    `stuck` are the first cells at which ranks stand still: (rank, cell); none in a schedule that ends.
    """

    rank: tuple[int, ...]
    cell: tuple[int, ...]
    after: tuple[int, ...]
    cut: tuple[int, ...]
    stuck: tuple[tuple[int, int], ...]


def dependency_of(chunk: int, kind: str, chunks: int) -> tuple[int, str] | None:
    """Return (chunk, kind) of the same micro-batch that an action waits for. B stands for I too."""
    if kind == FORWARD:
        return (chunk - 1, FORWARD) if chunk else None
    if kind == WEIGHT:
        return chunk, BACKWARD
    return (chunk + 1, BACKWARD) if chunk + 1 < chunks else (chunk, FORWARD)


def topological_order(schedule: Schedule) -> TopologicalOrder:
    """Order the actions by running each rank as far as it can, again and again. The schedule's chunks lie on one rank each."""
    rank_of, last, many = schedule.rank_of, schedule.chunks - 1, schedule.micro_batches
    done = [-1] * (2 * len(rank_of) * many)  # forwards, then backwards (I or B), by chunk and micro-batch
    backwards = len(rank_of) * many
    waiting: dict[int, list[int]] = {}
    places = [0] * len(schedule.ranks)
    ranks: list[int] = []
    cells: list[int] = []
    afters: list[int] = []
    cuts: list[int] = []
    ready = list(reversed(range(len(schedule.ranks))))
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        for place in range(places[rank], len(actions)):
            action = actions[place]
            chunk, kind = action.chunk, action.kind
            mine, before = chunk * many + action.micro_batch, -1
            if kind == FORWARD:
                key = mine - many if chunk else -1
                before = chunk - 1
            elif kind == WEIGHT:
                mine, key = -1, backwards + mine
                before = chunk
            else:
                key = mine if chunk == last else backwards + mine + many
                before = chunk if chunk == last else chunk + 1
                mine += backwards
            after = -1
            if key >= 0:
                after = done[key]
                if after < 0:
                    waiting.setdefault(key, []).append(rank)
                    break
            if mine >= 0:
                done[mine] = len(ranks)
                if mine in waiting:
                    ready += waiting.pop(mine)
            ranks.append(rank)
            cells.append(place)
            afters.append(after)
            cuts.append(min(before, chunk) if after >= 0 and rank_of[before] != rank else -1)
            places[rank] = place + 1
    stuck = tuple((rank, place) for rank, place in enumerate(places) if place < len(schedule.ranks[rank]))
    return TopologicalOrder(tuple(ranks), tuple(cells), tuple(afters), tuple(cuts), stuck)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Micro-batches of a chunk: `whole` between F and B or I; of `deferred` ones, between I and W, only what W reads is left."""

    whole: int
    deferred: int


def most_in_flight(actions: Iterable[Action]) -> int:
    """Return the most (chunk, micro-batch) pairs of a rank, from F to B or W."""
    now = most = 0
    for action in actions:
        now += {FORWARD: 1, INPUT: 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def peak_in_flight(
    actions: Iterable[Action], chunks: Sequence[int], saved_bytes: Sequence[float], deferred_bytes: Sequence[float] = ()
) -> tuple[InFlight, ...]:
    """Return what is in flight at the memory peak, per chunk of a rank. `saved_bytes`: what one micro-batch saves in each chunk
    until B or I; `deferred_bytes`: what of it stays from I to W (all of it where that is not said)."""
    deferred_bytes = deferred_bytes or saved_bytes
    place = {chunk: index for index, chunk in enumerate(chunks)}
    whole, late = [0] * len(place), [0] * len(place)
    best, now, most = (whole.copy(), late.copy()), 0.0, 0.0
    for action in actions:
        at = place[action.chunk]
        if action.kind == FORWARD:
            whole[at] += 1
            now += saved_bytes[at]
        elif action.kind == BACKWARD:
            whole[at] -= 1
            now -= saved_bytes[at]
        elif action.kind == INPUT:
            whole[at] -= 1
            late[at] += 1
            now += deferred_bytes[at] - saved_bytes[at]
        else:
            late[at] -= 1
            now -= deferred_bytes[at]
        if now > most * (1 + 1e-12):
            most, best = now, (whole.copy(), late.copy())
    return tuple(map(InFlight, *best))
