"""Memory events by hand, against a ledger of tensors that are allocated and freed, and monotonicity of the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.events.memory_terms import CallMemory
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StateMemory, StatePolicy, state_memory
from autopar.cost_models.step.memory_events import KINDS, PeakMemory, peak_memory

NONE = StateMemory(0, 0, 0, 0, False, 0)
FSDP = StatePolicy(compute_bytes=2, master_bytes=4, gradient_bytes=4, optimizer_bytes=8)
amounts = st.integers(0, 50)


def call(saved: float, forward: float, backward: float, input_gradient: float = 0, state: StateMemory = NONE) -> CallMemory:
    return CallMemory(saved, forward, backward, input_gradient, state)


def test_zero_3_by_hand() -> None:
    """Two calls. Backward of the second: both are saved (110), its working set (18), its weights and those of the first, which
    are prefetched. Then of the first: it is saved (50), its working set 17, its weights, the second's gradients (30) and the
    buffer that those are reduced in (40)."""
    state = StateMemory(
        parameters=100,
        gradients=30,
        optimizer=200,
        gathered=10,
        gathered_is_transient=True,
        unsharded_gradients=20,
        reduce_buffer=40,
        buffers=1,
    )
    calls = [call(50, 55, 17, 3, state), call(60, 65, 18, 4, state)]
    found = peak_memory(calls, NONE, 1000, foreach=False, inputs_bytes=9)
    assert found.event.phase == "backward" and found.event.call == 1
    assert found.table == {
        "parameters": 200, "optimizer": 400, "gradients": 0, "gathered": 20, "activations": 110, "temporaries": 18,
        "collectives": 0, "buffers": 2, "inputs": 9, "slack": 0, "base": 1000,
    }  # fmt: skip
    light = peak_memory([call(50, 55, 17, 3, state), call(5, 5, 18, 4, state)], NONE, 0, foreach=False)
    assert (light.event.phase, light.event.call, light.event.total_bytes) == ("backward", 0, 50 + 17 + 10 + 30 + 40)
    tiny = peak_memory([call(50, 55, 0, 3, state), call(5, 5, 0, 4, state)], NONE, 0, foreach=False)
    # its weights arrive in a flat buffer and are copied out of it: twice the bytes, before its working set is allocated
    assert (tiny.event.phase, tiny.event.call, tiny.event.total_bytes) == ("gather", 0, 50 + 3 + 2 * 10 + 30 + 40)


def test_the_optimizer_may_be_the_peak() -> None:
    state = state_memory(StateGroup(1000, 1000, 2, largest=100), 3, 4, FSDP)
    few = peak_memory([call(1, 1, 1, 0, state)] * 3, NONE, 0, foreach=True)
    assert few.event.phase == "gather"
    many = peak_memory([call(1, 1, 1, 0, state)] * 9, NONE, 0, foreach=True)
    assert many.event.phase == "optimizer" and many.table["gradients"] == 9 * 1000 == many.table["temporaries"]
    assert many.table["activations"] == many.table["gathered"] == 0


class Ledger:
    """Bytes by name; `most` is the largest sum at any `look`."""

    def __init__(self) -> None:
        self.there: dict[Any, float] = {}
        self.most = 0.0

    def look(self, **more: float) -> None:
        self.most = max(self.most, sum(self.there.values()) + sum(more.values()))

    def drop(self, *names: Any) -> None:
        for name in names:
            self.there.pop(name, None)


def ledger_of(calls: list[CallMemory]) -> float:
    """ZeRO-3 (FSDP2): weights are gathered into a flat buffer, copied out of it, and freed after the call; in the backward the
    next call's are prefetched; a gradient reduction's buffer lives until the next call's replaces it."""
    ledger, n = Ledger(), len(calls)
    for i, each in enumerate(calls):
        ledger.there["weights", i] = ledger.there["flat"] = each.state.gathered
        ledger.look(made=each.forward_bytes)
        ledger.there["saved", i] = each.saved_bytes
        ledger.drop(("weights", i), "flat")
    for i in reversed(range(n)):
        each = calls[i]
        ledger.drop(("weights", i))
        ledger.look(weights=each.state.gathered, flat=each.state.gathered, ending=each.input_gradient_bytes)
        ledger.there["weights", i] = each.state.gathered
        if i:
            ledger.there["weights", i - 1] = calls[i - 1].state.gathered
        ledger.look(working=each.backward_bytes)
        ledger.drop(("saved", i), ("weights", i))
        ledger.there["unreduced", i] = each.state.unsharded_gradients
        before = ledger.there.pop("buffer", 0.0)
        ledger.look(ending=each.input_gradient_bytes, buffer=max(before, each.state.reduce_buffer))
        ledger.drop(("unreduced", i))
        ledger.there["buffer"] = each.state.reduce_buffer
        ledger.there["gradient", i] = each.state.gradients
    ledger.look()
    ledger.drop("buffer")
    ledger.look(update=2 * max(each.state.largest_tensor for each in calls))
    return ledger.most


@st.composite
def zero_3_calls(draw: st.DrawFn) -> list[CallMemory]:
    state = st.builds(
        StateMemory,
        amounts,
        amounts,
        amounts,
        amounts,
        st.just(True),
        amounts,
        amounts,
        amounts,
        st.just(False),
        largest_tensor=amounts,
    )
    return draw(st.lists(st.builds(CallMemory, amounts, amounts, amounts, amounts, state), min_size=1, max_size=5))


@given(zero_3_calls())
@settings(max_examples=200, deadline=None)
def test_the_peak_is_the_ledgers(calls: list[CallMemory]) -> None:
    found = peak_memory(calls, NONE, 0, foreach=False)
    fixed = sum(each.state.parameters + each.state.optimizer + each.state.buffers for each in calls)
    assert sum(found.table.values()) == pytest.approx(fixed + ledger_of(calls))


def moving(found: PeakMemory) -> float:
    return found.event.total_bytes


@given(zero_3_calls(), st.data())
@settings(max_examples=100, deadline=None)
def test_more_of_anything_is_no_less_at_the_peak(calls: list[CallMemory], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(calls) - 1))
    name = data.draw(st.sampled_from(["saved_bytes", "forward_bytes", "backward_bytes", "input_gradient_bytes"]))
    more = list(calls)
    more[index] = replace(calls[index], **{name: getattr(calls[index], name) + data.draw(amounts)})
    for micro_batches in (1, 4):
        assert moving(peak_memory(calls, NONE, 0, False, micro_batches)) <= moving(
            peak_memory(more, NONE, 0, False, micro_batches)
        )


@given(zero_3_calls(), amounts, amounts, st.integers(1, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_table_adds_up(calls: list[CallMemory], base: int, inputs: int, micro_batches: int, foreach: bool) -> None:
    found = peak_memory(calls, NONE, base, foreach, micro_batches, inputs)
    slack = peak_memory(calls, NONE, base, foreach, micro_batches, inputs, slack=0.25).table
    assert slack == found.table | {"slack": 0.25 * moving(found)}
    fixed = sum(each.state.parameters + each.state.optimizer + each.state.buffers for each in calls)
    assert tuple(found.table) == KINDS
    assert sum(found.table.values()) == pytest.approx(fixed + base + inputs + moving(found))
    assert peak_memory(calls, NONE, base, foreach, micro_batches).table == found.table | {"inputs": 0.0}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_micro_batches_keep_their_gradients(zero: int) -> None:
    """From the second micro-batch on, the sum of all gradients is there in the forward: ZeRO 0 and 1 whole, 2 and 3 a shard."""
    state = state_memory(StateGroup(1000, 1000, 2, largest=100), zero, 4, FSDP)
    calls = [call(10**6, 10**6, 0, 0, state) for _ in range(3)]
    several = peak_memory(calls, NONE, 0, False, micro_batches=2)
    assert several.event.gradients == 3 * (4000 if zero < 2 else 1000)


@pytest.mark.parametrize("flight", [1, 2, 4])
def test_pipelines_keep_every_micro_batch_in_flight(flight: int) -> None:
    """Micro-batches in flight are saved whole; the one that runs is freed call by call."""
    calls = [CallMemory(flight * 100, 120, 30, 5, NONE, latest_saved_bytes=100.0) for _ in range(3)]
    found = peak_memory(calls, NONE, 0, False, micro_batches=4)
    assert found.event.total_bytes == (flight - 1) * 300 + 300 + 30 and found.event.phase == "backward"


def test_gradients_of_shared_weights_live_until_the_first_call() -> None:
    """A gradient of the root from the last call's backward to the first one's, where another is added to it."""
    root = StateMemory(0, 0, 0, 10, False, unsharded_gradients=1000, reduce_buffer=0, reduced_in_place=False)
    found = peak_memory([call(10, 10, 0), call(10, 10, 0)], root, 0, False)
    assert (found.event.phase, found.event.call) == ("backward", 0) and found.event.temporaries == 3000
    assert found.event.gathered == 10
