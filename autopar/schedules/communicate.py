"""Transfers and state of the data axis, put between the computing actions of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule
from autopar.schedules.check import TopologicalOrder, topological_order


def with_communication(schedule: Schedule, zero: Sequence[int] | None = None) -> Schedule:
    """Add transfers to `schedule`, which computes only, and can run (`check`).

    A send is right after the action that makes it. From one rank to another, what is received is received in the order in which
    it is sent, and a receive is posted at least one computing action before its consumer, or at the beginning. It is also posted
    no later than in some order of all ranks in which each send comes after its receive: even senders that wait for the
    receive to be posted never wait in a circle.

    `zero` is the state sharding per chunk, None where there is no data axis. ``REDUCE_GRAD`` is right after a chunk's last
    action that makes gradients of weights. With 1 and 2, parameters are gathered once: ``UNSHARD`` is an action before the first
    forward, ``RESHARD`` after the reduction. With 3 each block gathers when it runs, and there is nothing to do for a chunk.
    """
    rank_of, last = schedule.rank_of, schedule.chunks - 1
    posted = _posted_receives(schedule)
    out: list[tuple[Action, ...]] = []
    for rank, actions in enumerate(schedule.ranks):
        state_before, state_after = _state_actions(actions, zero)
        line: list[Action] = []
        for place, action in enumerate(actions):
            line += [*state_before.get(place, ()), *posted.get((rank, place), ()), action]
            sent = _sent(action, rank_of, last)
            if sent is not None:
                line.append(sent)
            line += state_after.get(place, ())
        out.append(tuple(line))
    return Schedule(schedule.name, tuple(out))


def _sent(action: Action, rank_of: Sequence[int], last: int) -> Action | None:
    """Return the send after an action, where its result goes to another rank."""
    chunk = action.chunk
    if action.kind == FORWARD and chunk < last and rank_of[chunk + 1] != rank_of[chunk]:
        return Action(chunk, "SEND_F", action.micro_batch)
    if action.kind in (BACKWARD, INPUT) and chunk and rank_of[chunk - 1] != rank_of[chunk]:
        return Action(chunk, "SEND_B", action.micro_batch)
    return None


def _posted_receives(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """Return (rank, cell) -> the receives that are posted before that cell."""
    order = topological_order(schedule)
    index = {pair: number for number, pair in enumerate(zip(order.rank, order.cell, strict=True))}
    consumer = {order.after[at]: at for at, cut in enumerate(order.cut) if cut >= 0}
    reached = _reached(schedule, order)
    pairs: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for cell, action in enumerate(actions):
            at = consumer.get(index[rank, cell])
            if at is None:
                continue
            peer, place = order.rank[at], order.cell[at]
            kind = "RECV_F" if action.kind == FORWARD else "RECV_B"
            received = Action(schedule.ranks[peer][place].chunk, kind, action.micro_batch)
            latest = min(max(0, place - 1), reached[index[rank, cell], peer])
            pairs.setdefault((rank, peer), []).append((latest, received))
    places: dict[tuple[int, int], list[Action]] = {}
    for (_, peer), receives in sorted(pairs.items()):
        limit = len(schedule.ranks[peer])
        for latest, received in reversed(receives):  # what is sent earlier is posted no later
            limit = min(limit, latest)
            places.setdefault((peer, limit), []).insert(0, received)
    return places


def _reached(schedule: Schedule, order: TopologicalOrder) -> Mapping[tuple[int, int], int]:
    """Return (send's action, receiving rank) -> cells that this rank has ended when the action has ended, on a clock on which
    forwards take 1 and the rest of a backward as much."""
    many = len(schedule.ranks)
    length = {FORWARD: 1, BACKWARD: 2, INPUT: 1, WEIGHT: 1}
    ends, free = [0] * len(order.rank), [0] * many
    queue: list[tuple[int, int, int]] = []
    for at, (rank, cell, after) in enumerate(zip(order.rank, order.cell, order.after, strict=True)):
        start = max(free[rank], ends[after] if after >= 0 else 0)
        ends[at] = free[rank] = start + length[schedule.ranks[rank][cell].kind]
        heappush(queue, (ends[at], cell, at))
    consumer = {order.after[at]: order.rank[at] for at, cut in enumerate(order.cut) if cut >= 0}
    done, out = [0] * many, {}
    while queue:
        _, cell, at = heappop(queue)
        done[order.rank[at]] = cell + 1
        if at in consumer:
            out[at, consumer[at]] = done[consumer[at]]
    return out


def _state_actions(
    actions: Sequence[Action], zero: Sequence[int] | None
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Return cell -> what comes before it and after it."""
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    if zero is None:
        return before, after
    for chunk in dict.fromkeys(action.chunk for action in actions):
        first = next(place for place, action in enumerate(actions) if action.chunk == chunk)
        last = max(place for place, action in enumerate(actions) if action.chunk == chunk and action.kind in (BACKWARD, WEIGHT))
        once = zero[chunk] in (1, 2)
        if once:
            before.setdefault(max(0, first - 1), []).append(Action(chunk, "UNSHARD"))
        after[last] = [Action(chunk, "REDUCE_GRAD"), *[Action(chunk, "RESHARD")] * once]
    return before, after
