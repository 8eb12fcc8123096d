"""Micro-batches in flight: those whose saved activations a stage holds, and their peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, Action


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
