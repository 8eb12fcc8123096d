"""Backwards in two parts that are beside each other become whole again where nothing waits longer for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.ir.schedule import BACKWARD, INPUT, WEIGHT, Action, Schedule

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
