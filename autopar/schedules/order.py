"""The dependency of an action, and an order of all actions in which none waits for a later one."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, FORWARD, WEIGHT, Schedule


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
