"""The evaluator's memory events are those of the description that the integer program sums."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autopar.cost_models.events.memory_terms import CALL_FIELDS, CallMemory, EventTerms, Of, Term, step_events
from autopar.cost_models.state.state_memory import StateMemory
from autopar.cost_models.step.memory_events import peak_memory


def drawn_state(random: Random) -> StateMemory:
    in_place, gradients = random.random() < 0.4, random.randint(1, 50)
    numbers = [float(random.randint(1, 50)) for _ in range(8)]
    state = StateMemory(*numbers[:4], random.random() < 0.5, *numbers[4:6], 0.0, in_place, numbers[6])
    return replace(state, gradients=gradients, accumulated=gradients, persistent_reduce_buffer=in_place and random.random() < 0.5)


@pytest.mark.parametrize("several", [False, True])
def test_events_are_the_described_ones(several: bool) -> None:
    random = Random(several)
    for _ in range(200):
        calls = []
        for _ in range(random.randint(1, 5)):
            latest, *others = (float(random.randint(0, 50)) for _ in range(4))
            calls.append(CallMemory(latest + random.choice((0, 30)), *others, drawn_state(random), latest))
        root = drawn_state(random)

        def size(term: Term, index: int, calls: list[CallMemory] = calls, root: StateMemory = root) -> float:
            chosen = {
                Of.HERE: calls[index : index + 1], Of.PREVIOUS: calls[max(0, index - 1) : index],
                Of.NEXT: calls[index + 1 : index + 2], Of.BEFORE: calls[:index], Of.UNTIL: calls[: index + 1],
                Of.AFTER: calls[index + 1 :], Of.ALL: calls,
            }  # fmt: skip
            if term.of not in chosen:
                there = term.field not in CALL_FIELDS and (term.of is Of.ROOT or index + 1 < len(calls))
                return term.weight * getattr(root, term.field) if there else 0.0
            return term.weight * sum(
                getattr(each if term.field in CALL_FIELDS else each.state, term.field) for each in chosen[term.of]
            )

        def total(event: EventTerms, index: int, base: tuple[Term, ...] = ()) -> float:
            largest = max((size(each, index) for each in event.largest), default=0.0)
            return sum(size(each, index) for each in (*base, *event.terms)) + largest

        step, count = step_events(several), len(calls)
        described = [total(step.forward, index, step.base) for index in range(count)]
        for index in range(count - 1, -1, -1):
            every = [each for each in step.backward if not each.at_shared_sum or (count > 1 and index == 0)]
            described += [total(each, index, step.base) for each in every]
        described.append(total(step.end, 0))
        found = peak_memory(calls, root, 0.0, False, 1 + several)
        assert [event.total_bytes for event in found.events[:-1]] == pytest.approx(described)
