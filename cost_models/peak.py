"""The moments of a training step at which memory may peak, and the table of the largest.

Every term is linear in the choices, so that a solver can sum the same ones. The order of events is that of the runtime (FSDP2,
buckets, autograd), checked against the program itself by dry runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.state import StateMemory

KINDS = (
    "parameters", "optimizer", "gradients", "gathered", "activations", "temporaries", "collectives", "buffers", "inputs", "slack",
    "base",
)  # fmt: skip
"""`gathered` are whole weights, `activations` what is kept for the backward, of all micro-batches in flight; `temporaries` what
the operation at the peak holds, and gradients before they are reduced; `collectives` the buffers that weights arrive in and
gradients leave from; `buffers` the model's; `slack` what the allocator reserves beyond that; `base` context, communicators."""


@dataclass(frozen=True, slots=True)
class CallMemory:
    """One call: bytes kept from its forward to its backward (of all micro-batches in flight), what its forward makes (kept or
    not), what its backward holds beside what is kept, and when it ends; and its own state. `latest` is the part of `kept` that is
    of the micro-batch whose forward runs."""

    kept: float
    made: float
    working: float
    ending: float
    state: StateMemory
    latest: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """`phase` is forward, gather (weights arrive for the backward), backward, reduction (the backward ends) or optimizer; `call`
    is an index, -1 for the optimizer."""

    phase: str
    call: int
    gradients: float
    gathered: float
    activations: float
    temporaries: float
    collectives: float = 0.0

    @property
    def bytes(self) -> float:
        return self.gradients + self.gathered + self.activations + self.temporaries + self.collectives


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes by kind at the largest moment; their sum is the peak."""

    moment: Moment
    table: dict[str, float]


def peak_of(
    calls: Sequence[CallMemory],
    root: StateMemory,
    base_bytes: float,
    foreach: bool,
    micro_batches: int = 1,
    inputs_bytes: float = 0.0,
    slack: float = 0.0,
) -> Peak:
    """`root` is the state of parameters that several calls share, gathered all step long. `foreach` tells that the optimizer
    updates all parameters at once, with a temporary of the master's size for each; else it takes them one by one, with two.
    `inputs_bytes` is the batch as it is given: whole, on every device. `slack` is the allocator's share of all tensors."""
    states = [call.state for call in calls] + [root]
    fixed = {
        "parameters": sum(state.parameters for state in states),
        "optimizer": sum(state.optimizer for state in states),
        "buffers": sum(state.buffers for state in states),
        "inputs": inputs_bytes,
        "base": base_bytes,
    }
    update = sum(state.updated for state in states) if foreach else 2 * max(state.largest for state in states)
    moments = list(_moments(calls, root, micro_batches))
    moments.append(Moment("optimizer", -1, sum(state.gradients for state in states), 0.0, 0.0, update))
    peak = max(moments, key=lambda moment: moment.bytes)
    moving = ("gradients", "gathered", "activations", "temporaries", "collectives")
    table = fixed | {kind: getattr(peak, kind) for kind in moving}
    table["slack"] = slack * (sum(table.values()) - base_bytes)
    return Peak(peak, {kind: table[kind] for kind in KINDS})


def peak_memory(
    calls: Sequence[CallMemory], root: StateMemory, base_bytes: float, foreach: bool, micro_batches: int = 1
) -> dict[str, float]:
    """The table of `peak_of`."""
    return peak_of(calls, root, base_bytes, foreach, micro_batches).table


def _moments(calls: Sequence[CallMemory], root: StateMemory, micro_batches: int) -> Iterator[Moment]:
    """Forward of call i: what earlier calls keep, all that this forward makes, its gathered weights and the flat buffer that they
    arrived in. Backward: its weights arrive again (gather); then all that calls up to i keep, its working set, the buffer where
    gradients of call i + 1 are still being reduced, weights of the call and of the one that is prefetched. At its end (reduction)
    the call's tensors are gone, its unsharded gradients are there and the buffer that they are reduced in.

    Shared weights get their first gradient in the last call's backward, hold it till the first call's, where another is added to
    it (autograd makes the sum anew), and are reduced then. After the first micro-batch the gradients of all calls are there, and
    weights that stay gathered do not arrive again.
    """
    states = [call.state for call in calls]
    passing = [state.gathered if state.gathered_is_transient else 0.0 for state in states]
    standing = root.gathered + sum(state.gathered for state in states if not state.gathered_is_transient)
    several = micro_batches > 1
    before = sum(state.accumulated * (state.standing + several) for state in (*states, root))
    kept = sum(call.kept - _latest(call) for call in calls)
    for index, call in enumerate(calls):
        arriving = 0.0 if several and not states[index].gathered_is_transient else states[index].gathered
        yield Moment("forward", index, before, standing + passing[index], kept, call.made, arriving)
        kept += _latest(call)
    arrived = held = reducing = 0.0
    shared = root.unreduced + (root.gradients if root.in_place else 0.0)
    for index in reversed(range(len(calls))):
        call, state = calls[index], states[index]
        weights = standing + sum(passing[max(0, index - 1) : index + 1])
        there = before + arrived
        arriving = passing[index] + reducing
        yield Moment("gather", index, there, standing + passing[index], kept, call.ending + held, arriving)
        yield Moment("backward", index, there, weights, kept, call.working + held, reducing)
        if held and index == 0:
            yield Moment("backward", index, there, weights, kept, call.ending + 3 * held, reducing)
        kept -= _latest(call)
        held = shared
        fresh, new = _gradients(state, micro_batches)
        arrived += new if state.in_place else 0.0
        leaving = max(0.0 if state.standing else state.reducing, reducing)
        yield Moment("reduction", index, before + arrived, weights - passing[index], kept, call.ending + fresh + held, leaving)
        arrived += 0.0 if state.in_place else new
        reducing = 0.0 if state.in_place else state.reducing
    fresh, _ = _gradients(root, micro_batches)
    leaving = max(0.0 if root.standing else root.reducing, reducing)
    yield Moment("reduction", 0, before + arrived, root.gathered, kept, max(held, fresh), leaving)


def _gradients(state: StateMemory, micro_batches: int) -> tuple[float, float]:
    """Of one call, when its backward ends: (gradients that are still to be reduced or added, those that are there for good)."""
    if state.standing or (state.in_place and micro_batches > 1):
        return state.unreduced + state.gradients, 0.0
    return state.unreduced, state.gradients if micro_batches == 1 else 0.0


def _latest(call: CallMemory) -> float:
    """What a call keeps of one micro-batch."""
    return call.kept if call.latest is None else call.latest
