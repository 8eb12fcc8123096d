"""Schedules by a simulation in which each rank takes what is there, by rules; and a search over the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import TypeVar

from autopar.schedules.task import BACKWARDS, FORWARDS, WEIGHTS, Order, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """Per rank. `ahead`: so many (chunk, micro-batch) pairs it takes before it prefers backwards; `most`, per chunk: never more.
    It waits for what is known to arrive within `patience` of the action's own time rather than begin a forward, or weights.
    `deep`: of forwards, those of later chunks first; `early`: of backwards, those of earlier chunks first."""

    ahead: tuple[int, ...]
    most: tuple[int, ...]
    patience: tuple[tuple[float, float], ...]
    deep: tuple[bool, ...]
    early: tuple[bool, ...]


_POOL = 5
"""Rules that are changed beside each other."""


def run(task: Task, rules: Rules) -> tuple[float, Order]:
    """(makespan, order). Ends always: a rank keeps room for all chunks of the micro-batch that is next at its last chunk."""
    many, ranks, last = task.micro_batches, task.ranks, len(task.rank_of) - 1
    mine = [task.chunks_of(rank) for rank in range(ranks)]
    arrival: list[list[list[float]]] = [[[], []] for _ in task.rank_of]
    arrival[0][FORWARDS] = [0.0] * many
    done = [[0, 0, 0] for _ in task.rank_of]
    free, used, pairs = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    orders: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    events = [(0.0, rank) for rank in range(ranks)]
    limits = [limit * (1 + 1e-9) for limit in task.limit]
    makespan = 0.0

    def has_room(rank: int, chunk: int) -> bool:
        oldest = done[mine[rank][-1]][FORWARDS]
        if done[chunk][FORWARDS] == oldest:
            return used[rank] + task.kept[chunk] <= limits[rank]
        if done[chunk][FORWARDS] - done[chunk][task.last_kind] >= rules.most[chunk]:
            return False
        reserve = sum(task.kept[each] for each in mine[rank] if done[each][FORWARDS] <= oldest)
        return used[rank] + task.kept[chunk] + reserve <= limits[rank]

    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        best: tuple[int, int, int] | None = None
        soon = inf
        for chunk in mine[rank]:
            counts = done[chunk]
            number = counts[BACKWARDS]
            if number < len(arrival[chunk][BACKWARDS]):
                at = arrival[chunk][BACKWARDS][number]
                if at > now:
                    soon = min(soon, at)
                else:
                    rank_of_it = 1, -chunk if rules.early[rank] else chunk, BACKWARDS
                    best = rank_of_it if best is None or rank_of_it > best else best
            number = counts[FORWARDS]
            if number < len(arrival[chunk][FORWARDS]) and has_room(rank, chunk):
                at = arrival[chunk][FORWARDS][number]
                if at > now:
                    soon = min(soon, at)
                else:
                    first = 2 if pairs[rank] < rules.ahead[rank] else 0
                    rank_of_it = first, chunk if rules.deep[rank] else -chunk, FORWARDS
                    best = rank_of_it if best is None or rank_of_it > best else best
        if best is None:
            for chunk in mine[rank]:
                if task.split and done[chunk][WEIGHTS] < done[chunk][BACKWARDS]:
                    waits = best is None or done[chunk][WEIGHTS] < done[abs(best[1])][WEIGHTS]
                    best = (-1, chunk, WEIGHTS) if waits else best
            if best is None:
                continue
        kind, chunk = best[2], abs(best[1])
        number = done[chunk][kind]
        seconds = task.duration(chunk, kind, number)
        if kind != BACKWARDS and soon - now < seconds * rules.patience[rank][kind == WEIGHTS]:
            continue  # what arrives wakes the rank
        end = now + seconds
        done[chunk][kind] = number + 1
        orders[rank].append((chunk, kind, number))
        free[rank] = end
        makespan = max(makespan, end)
        heappush(events, (end, rank))
        if kind == FORWARDS:
            used[rank] += task.kept[chunk]
            pairs[rank] += 1
            to, way, lag = (chunk + 1, FORWARDS, task.lags[chunk]) if chunk < last else (chunk, BACKWARDS, 0.0)
        else:
            if kind == BACKWARDS:
                used[rank] += (task.late[chunk] if task.split else 0.0) - task.kept[chunk]
            else:
                used[rank] -= task.late[chunk]
            pairs[rank] -= kind == task.last_kind
            to, way, lag = (chunk - 1, BACKWARDS, task.lags[chunk - 1]) if kind == BACKWARDS and chunk else (-1, 0, 0.0)
        if to >= 0:
            arrival[to][way].append(end + lag)
            heappush(events, (end + lag, task.rank_of[to]))
    whole = many * (3 if task.split else 2)
    if any(len(orders[rank]) < whole * len(mine[rank]) for rank in range(ranks)):
        return inf, ()
    return makespan, tuple(map(tuple, orders))


def first_rules(task: Task) -> list[Rules]:
    """Backwards first, or as far ahead as there is room, and in between; chunks share the room in several ways."""
    ranks, yes = task.ranks, (True,) * task.ranks
    out = []
    for ahead in (0, 1, 2, 3):
        for most in _shares(task):
            for patient in ((0.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0)):
                for deep in (True, False):
                    aheads = tuple(round(ahead / 2 * (ranks - rank)) for rank in range(ranks))
                    out.append(Rules(aheads, most, (patient,) * ranks, (deep,) * ranks, yes))
    return out


def _shares(task: Task) -> list[tuple[int, ...]]:
    """How many micro-batches each chunk may hold: all; or what the room allows, shared as if a micro-batch stayed in a chunk for
    the way from there to the last chunk and back, and in the last one for some part of that."""
    many, last = task.micro_batches, len(task.rank_of) - 1
    out = [(many,) * (last + 1)]
    for rest in (0.1, 0.3, 1.0):
        most = []
        for chunk, rank in enumerate(task.rank_of):
            mine = task.chunks_of(rank)
            total = sum(task.kept[each] * (last - each + rest * last) for each in mine)
            share = (last - chunk + rest * last) / total if total else inf
            most.append(max(1, min(many, round(task.limit[rank] * share)) if share < inf else many))
        out.append(tuple(most))
    return out


def improve(
    task: Task, best: float, order: Order, bound: float, more_time: Callable[[], bool], seed: int = 0
) -> tuple[float, Order]:
    """The best order of rules that are changed one by one, at random, while there is time."""
    random = Random(seed)
    tried = [(*run(task, rules), rules) for rules in first_rules(task)]
    pool = [(seconds, rules) for seconds, _, rules in sorted(tried, key=lambda each: each[0])[:_POOL]]
    found, made, _ = min(tried, key=lambda each: each[0])
    if found < best:
        best, order = found, made
    while more_time() and best > bound * (1 + 1e-9):
        place = min(random.randrange(len(pool)), random.randrange(len(pool)))
        seconds, rules = pool[place]
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            rules = _changed(rules, random.randrange(task.ranks), random, task)
        found, made = run(task, rules)
        if found <= seconds * (1 + random.choice((0.0, 0.0, 0.0, 0.002))):
            pool[place] = found, rules
            pool.sort(key=lambda each: each[0])
        if found < best * (1 - 1e-12):
            best, order = found, made
    return best, order


def _changed(rules: Rules, rank: int, random: Random, task: Task) -> Rules:
    """One thing of one rank."""
    field = random.choice(("ahead", "ahead", "most", "patience", "patience", "deep", "early"))
    if field == "ahead":
        ahead = max(0, rules.ahead[rank] + random.choice((-3, -2, -1, 1, 2, 3)))
        return replace(rules, ahead=_put(rules.ahead, rank, ahead))
    if field == "most":
        chunk, many = random.choice(task.chunks_of(rank)), task.micro_batches
        few = max(1, min(many, rules.most[chunk] + random.choice((-2, -1, 1, 2))))
        return replace(rules, most=_put(rules.most, chunk, random.choice((many, few, few))))
    if field == "patience":
        patience = random.choice((0.0, 0.25, 0.5, 1.0)), random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        return replace(rules, patience=_put(rules.patience, rank, patience))
    if field == "deep":
        return replace(rules, deep=_put(rules.deep, rank, not rules.deep[rank]))
    return replace(rules, early=_put(rules.early, rank, not rules.early[rank]))


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
