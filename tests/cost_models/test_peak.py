"""The moments of the peak by hand, against a ledger of tensors that come and go, and what must hold of any numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.peak import KINDS, CallMemory, Peak, peak_memory, peak_of
from autopar.cost_models.state import StateMemory, StatePolicy, state_memory

NONE = StateMemory(0, 0, 0, 0, False, 0)
FSDP = StatePolicy(compute_bytes=2, master_bytes=4, gradient_bytes=4, moment_bytes=8)
amounts = st.integers(0, 50)


def call(kept: float, made: float, working: float, ending: float = 0, state: StateMemory = NONE) -> CallMemory:
    return CallMemory(kept, made, working, ending, state)


def test_zero_3_by_hand() -> None:
    """Two calls. Backward of the second: both are kept (110), its working set (18), its weights and those of the first, which
    are prefetched. Then of the first: it is kept (50), its working set 17, its weights, the second's gradients (30) and the
    buffer that those are reduced in (40)."""
    state = StateMemory(
        parameters=100, gradients=30, optimizer=200, gathered=10, gathered_is_transient=True, unreduced=20, reducing=40, buffers=1
    )
    calls = [call(50, 55, 17, 3, state), call(60, 65, 18, 4, state)]
    found = peak_of(calls, NONE, 1000, foreach=False, inputs_bytes=9)
    assert found.moment.phase == "backward" and found.moment.call == 1
    assert found.table == {
        "parameters": 200, "optimizer": 400, "gradients": 0, "gathered": 20, "activations": 110, "temporaries": 18,
        "collectives": 0, "buffers": 2, "inputs": 9, "slack": 0, "base": 1000,
    }  # fmt: skip
    light = peak_of([call(50, 55, 17, 3, state), call(5, 5, 18, 4, state)], NONE, 0, foreach=False)
    assert (light.moment.phase, light.moment.call, light.moment.bytes) == ("backward", 0, 50 + 17 + 10 + 30 + 40)
    tiny = peak_of([call(50, 55, 0, 3, state), call(5, 5, 0, 4, state)], NONE, 0, foreach=False)
    # its weights arrive in a flat buffer and are copied out of it: as much again, before its working set is there
    assert (tiny.moment.phase, tiny.moment.call, tiny.moment.bytes) == ("gather", 0, 50 + 3 + 2 * 10 + 30 + 40)


def test_the_optimizer_may_be_the_peak() -> None:
    state = state_memory(1000, 3, 4, FSDP, largest=100)
    few = peak_of([call(1, 1, 1, 0, state)] * 3, NONE, 0, foreach=True)
    assert few.moment.phase == "gather"
    many = peak_of([call(1, 1, 1, 0, state)] * 9, NONE, 0, foreach=True)
    assert many.moment.phase == "optimizer" and many.table["gradients"] == 9 * 1000 == many.table["temporaries"]
    assert many.table["activations"] == many.table["gathered"] == 0


class Ledger:
    """Bytes by name; `most` is the largest sum that `look` ever saw."""

    def __init__(self) -> None:
        self.there: dict[Any, float] = {}
        self.most = 0.0

    def look(self, **more: float) -> None:
        self.most = max(self.most, sum(self.there.values()) + sum(more.values()))

    def drop(self, *names: Any) -> None:
        for name in names:
            self.there.pop(name, None)


def ledger_of(calls: list[CallMemory]) -> float:
    """ZeRO-3 (FSDP2): weights come in a flat buffer, are copied out, and go after the call; behind a call the next ones are
    prefetched in the backward; a buffer of gradients being reduced lives until the next call's take its place."""
    ledger, n = Ledger(), len(calls)
    for i, each in enumerate(calls):
        ledger.there["weights", i] = ledger.there["flat"] = each.state.gathered
        ledger.look(made=each.made)
        ledger.there["kept", i] = each.kept
        ledger.drop(("weights", i), "flat")
    for i in reversed(range(n)):
        each = calls[i]
        ledger.drop(("weights", i))
        ledger.look(weights=each.state.gathered, flat=each.state.gathered, ending=each.ending)
        ledger.there["weights", i] = each.state.gathered
        if i:
            ledger.there["weights", i - 1] = calls[i - 1].state.gathered
        ledger.look(working=each.working)
        ledger.drop(("kept", i), ("weights", i))
        ledger.there["unreduced", i] = each.state.unreduced
        before = ledger.there.pop("buffer", 0.0)
        ledger.look(ending=each.ending, buffer=max(before, each.state.reducing))
        ledger.drop(("unreduced", i))
        ledger.there["buffer"] = each.state.reducing
        ledger.there["gradient", i] = each.state.gradients
    ledger.look()
    ledger.drop("buffer")
    ledger.look(update=2 * max(each.state.largest for each in calls))
    return ledger.most


@st.composite
def zero_3_calls(draw: st.DrawFn) -> list[CallMemory]:
    state = st.builds(
        StateMemory, amounts, amounts, amounts, amounts, st.just(True), amounts, amounts, amounts, st.just(False), largest=amounts
    )
    return draw(st.lists(st.builds(CallMemory, amounts, amounts, amounts, amounts, state), min_size=1, max_size=5))


@given(zero_3_calls())
@settings(max_examples=200, deadline=None)
def test_the_peak_is_the_ledgers(calls: list[CallMemory]) -> None:
    found = peak_of(calls, NONE, 0, foreach=False)
    fixed = sum(each.state.parameters + each.state.optimizer + each.state.buffers for each in calls)
    assert sum(found.table.values()) == pytest.approx(fixed + ledger_of(calls))


def moving(found: Peak) -> float:
    return found.moment.bytes


@given(zero_3_calls(), st.data())
@settings(max_examples=100, deadline=None)
def test_more_of_anything_is_no_less_at_the_peak(calls: list[CallMemory], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(calls) - 1))
    name = data.draw(st.sampled_from(["kept", "made", "working", "ending"]))
    more = list(calls)
    more[index] = replace(calls[index], **{name: getattr(calls[index], name) + data.draw(amounts)})
    for micro_batches in (1, 4):
        assert moving(peak_of(calls, NONE, 0, False, micro_batches)) <= moving(peak_of(more, NONE, 0, False, micro_batches))


@given(zero_3_calls(), amounts, amounts, st.integers(1, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_table_adds_up(calls: list[CallMemory], base: int, inputs: int, micro_batches: int, foreach: bool) -> None:
    found = peak_of(calls, NONE, base, foreach, micro_batches, inputs)
    slack = peak_of(calls, NONE, base, foreach, micro_batches, inputs, slack=0.25).table
    assert slack == found.table | {"slack": 0.25 * (sum(found.table.values()) - base)}
    fixed = sum(each.state.parameters + each.state.optimizer + each.state.buffers for each in calls)
    assert tuple(found.table) == KINDS
    assert sum(found.table.values()) == pytest.approx(fixed + base + inputs + moving(found))
    assert peak_memory(calls, NONE, base, foreach, micro_batches) == found.table | {"inputs": 0.0}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_micro_batches_keep_their_gradients(zero: int) -> None:
    """From the second micro-batch on, the sum of all gradients is there in the forward: ZeRO 0 and 1 whole, 2 and 3 a shard."""
    state = state_memory(1000, zero, 4, FSDP, largest=100)
    calls = [call(10**6, 10**6, 0, 0, state) for _ in range(3)]
    several = peak_of(calls, NONE, 0, False, micro_batches=2)
    assert several.moment.gradients == 3 * (4000 if zero < 2 else 1000)


@pytest.mark.parametrize("flight", [1, 2, 4])
def test_pipelines_keep_every_micro_batch_in_flight(flight: int) -> None:
    """What is in flight is kept whole; the micro-batch that runs goes call by call."""
    calls = [CallMemory(flight * 100, 120, 30, 5, NONE, latest=100.0) for _ in range(3)]
    found = peak_of(calls, NONE, 0, False, micro_batches=4)
    assert found.moment.bytes == (flight - 1) * 300 + 300 + 30 and found.moment.phase == "backward"


def test_shared_weights_wait_for_the_first_call() -> None:
    """A gradient of the root from the last call's backward to the first one's, where another is added to it."""
    root = StateMemory(0, 0, 0, 10, False, unreduced=1000, reducing=0, in_place=False)
    found = peak_of([call(10, 10, 0), call(10, 10, 0)], root, 0, False)
    assert (found.moment.phase, found.moment.call) == ("backward", 0) and found.moment.temporaries == 3000
    assert found.moment.gathered == 10
