"""What a rank holds: of which micro-batches the activations of a chunk are alive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.ir.schedule import BACKWARD, FORWARD, INPUT, Action


@dataclass(frozen=True, slots=True)
class Held:
    """Micro-batches of a chunk: `whole` between F and B or I; of `late` ones only what W reads is left."""

    whole: int
    late: int


def most_held(actions: Iterable[Action]) -> int:
    """The most (chunk, micro-batch) pairs of a rank, from F to B or W."""
    now = most = 0
    for action in actions:
        now += {FORWARD: 1, INPUT: 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def held(
    actions: Iterable[Action], chunks: Sequence[int], kept_bytes: Sequence[float], late_bytes: Sequence[float] = ()
) -> tuple[Held, ...]:
    """Per chunk of a rank, what it holds when it holds most. `kept_bytes`: what one micro-batch keeps in each chunk until B or I;
    `late_bytes`: what of it lives on from I to W (all of it where that is not said)."""
    late_bytes = late_bytes or kept_bytes
    place = {chunk: index for index, chunk in enumerate(chunks)}
    whole, late = [0] * len(place), [0] * len(place)
    best, now, most = [Held(0, 0)] * len(place), 0.0, 0.0
    for action in actions:
        at = place[action.chunk]
        if action.kind == FORWARD:
            whole[at] += 1
            now += kept_bytes[at]
        elif action.kind == BACKWARD:
            whole[at] -= 1
            now -= kept_bytes[at]
        elif action.kind == INPUT:
            whole[at] -= 1
            late[at] += 1
            now += late_bytes[at] - kept_bytes[at]
        else:
            late[at] -= 1
            now -= late_bytes[at]
        if now > most * (1 + 1e-12):
            most, best = now, [Held(*each) for each in zip(whole, late, strict=True)]
    return tuple(best)
