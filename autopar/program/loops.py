"""Finds loops in a sequence of calls: equal blocks in a row, each of which reads the results of the one before (layers)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Call

LONGEST_BODY = 8
Slot = tuple[int, int]
"""(call of the body, position among its inputs or outputs)"""


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` repetitions of ``len(body)`` calls from `start`; `body` is the first repetition, `last` the last.

    `carried` are (input slot, output slot) pairs: the input is that output of the previous repetition. Every other input is
    computed in the same repetition, or is the same value in all of them.
    """

    start: int
    repetitions: int
    body: tuple[Call, ...]
    last: tuple[Call, ...]
    carried: tuple[tuple[Slot, Slot], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.repetitions * len(self.body)


def loops_of_calls(calls: Sequence[Call], results: Sequence[str]) -> Iterator[Loop]:
    """The calls in order, as loops; a call that is not repeated is a loop with one repetition."""
    uses = last_uses(calls, results)
    position = 0
    while position < len(calls):
        alone = (calls[position],)
        best = Loop(position, 1, alone, alone)
        for length in range(1, min(LONGEST_BODY, (len(calls) - position) // 2) + 1):
            found = _longest_loop(calls, position, length, uses)
            if found is not None and found.end > best.end:
                best = found
        yield best
        position = best.end


def last_uses(calls: Sequence[Call], results: Sequence[str]) -> dict[str, int]:
    """The last call that reads each value; ``len(calls)`` for the results of all."""
    out = {name: index for index, call in enumerate(calls) for name in call.inputs}
    return out | dict.fromkeys(results, len(calls))


def _longest_loop(calls: Sequence[Call], start: int, length: int, uses: dict[str, int]) -> Loop | None:
    """The longest loop from `start` whose body has `length` calls, if there is one."""

    def repetition(number: int) -> tuple[Call, ...]:
        return tuple(calls[start + number * length : start + (number + 1) * length])

    body = repetition(0)
    carried: dict[Slot, Slot] | None = None
    count = 1
    while start + (count + 1) * length <= len(calls):
        before, after = repetition(count - 1), repetition(count)
        found = _carried(body, before, after)
        if found is None or (carried is not None and found != carried):
            break
        dead_by = start + (count + 1) * length
        if any(uses.get(name, -1) >= dead_by for call in before for name in call.outputs):
            break
        carried, count = found, count + 1
    if carried is None or not _one_variable_each(body, carried):
        return None
    return Loop(start, count, body, repetition(count - 1), tuple(carried.items()))


def _carried(body: Sequence[Call], before: Sequence[Call], after: Sequence[Call]) -> dict[Slot, Slot] | None:
    """The inputs that `after` reads from `before`, where it equals `body` otherwise; None where it does not."""
    produced = {name: (i, slot) for i, call in enumerate(body) for slot, name in enumerate(call.outputs)}
    previous = {name: (i, slot) for i, call in enumerate(before) for slot, name in enumerate(call.outputs)}
    carried: dict[Slot, Slot] = {}
    for i, (first, call) in enumerate(zip(body, after, strict=True)):
        if (first.block, len(first.inputs), len(first.outputs)) != (call.block, len(call.inputs), len(call.outputs)):
            return None
        for k, (old, new) in enumerate(zip(first.inputs, call.inputs, strict=True)):
            if old in produced:
                j, slot = produced[old]
                if after[j].outputs[slot] != new:
                    return None
            elif new in previous:
                carried[i, k] = previous[new]
            elif new != old:
                return None
    return carried


def _one_variable_each(body: Sequence[Call], carried: dict[Slot, Slot]) -> bool:
    """Return whether one variable can hold each carried value: with one initial value, and not overwritten before its last
    read."""
    begins: dict[Slot, str] = {}
    for (i, k), source in carried.items():
        initial = body[i].inputs[k]
        if begins.setdefault(source, initial) != initial or i > source[0]:
            return False
    return True
