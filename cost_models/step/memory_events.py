"""Peak memory of a device: the events of a training step (`events.memory_terms`) with the bytes of one plan, and the table of
the largest one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from autopar.cost_models.events.memory_terms import CALL_FIELDS, STATE_FIELDS, CallMemory, Of, Term, step_events
from autopar.cost_models.state.offload_cost import update_temporaries
from autopar.cost_models.state.state_memory import StateMemory

KINDS = (
    "parameters", "optimizer", "gradients", "gathered", "activations", "temporaries", "collectives", "buffers", "inputs", "slack",
    "base",
)  # fmt: skip
"""`gathered`: unsharded weights; `activations`: saved for the backward, of all micro-batches in flight; `temporaries`: the
working set of the operation at the peak, and gradients before they are reduced; `collectives`: buffers of all-gathers and
gradient reductions; `buffers`: the model's; `inputs`: the batch; `slack`: what the allocator reserves beyond that; `base`:
context and communicators (`hardware.allocator` has both)."""

VARYING = ("gradients", "gathered", "activations", "temporaries", "collectives")
"""Kinds that a step allocates and frees; the fields of a `MemoryEvent`."""

_GRADIENTS, _ACTIVATIONS, _TEMPORARIES = (VARYING.index(kind) for kind in ("gradients", "activations", "temporaries"))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """The bytes at one event of the step.

    phase: forward, gather (all-gather for the backward), backward, reduction (the backward has ended) or optimizer.
    call: index of the call, -1 for the optimizer.
    gradients, ...: by kind, as in `KINDS`.
    """

    phase: str
    call: int
    gradients: float
    gathered: float
    activations: float
    temporaries: float
    collectives: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.gradients + self.gathered + self.activations + self.temporaries + self.collectives


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The bytes by kind at the largest event, whose sum is the peak. `held_bytes`: the most that stays when its forward, a
    backward or the optimizer has ended: state, gradients, and what is saved for a backward. `played`, `update`: the other
    events."""

    event: MemoryEvent
    table: dict[str, float]
    held_bytes: float = 0.0
    played: StepMemory | None = None
    update: MemoryEvent | None = None

    @property
    def events(self) -> tuple[MemoryEvent, ...]:
        """All events of the step, in their order."""
        return (*self.played.events(), self.update) if self.played is not None and self.update is not None else (self.event,)


def peak_memory(
    calls: Sequence[CallMemory],
    root: StateMemory,
    base_bytes: float,
    foreach: bool,
    micro_batches: int = 1,
    inputs_bytes: float = 0.0,
    slack: float = 0.0,
) -> PeakMemory:
    """Return the peak of the calls of one stage, in order.

    root: state of parameters that several calls share, gathered all step long.
    foreach: the optimizer updates all parameters at once, with a temporary of the master's size for each; else one by one, with
        two.
    inputs_bytes: the batch as the user passes it, unsharded on every device.
    slack: what the allocator reserves beyond tensors, as a share of what the step allocates.
    """
    states = [call.state for call in calls] + [root]
    fixed = {
        "parameters": sum(state.parameters for state in states),
        "optimizer": sum(state.optimizer for state in states),
        "buffers": sum(state.buffers for state in states),
        "inputs": inputs_bytes,
        "base": base_bytes,
    }
    gradients = sum(state.gradients for state in states)
    update = MemoryEvent("optimizer", -1, gradients, 0.0, 0.0, update_temporaries(states, foreach))
    played = StepMemory.of(calls, root, micro_batches > 1)
    peak = max(played.largest(), update, key=lambda event: event.total_bytes)
    table = fixed | {kind: getattr(peak, kind) for kind in VARYING}
    table["slack"] = slack * peak.total_bytes
    always_gathered = sum(state.gathered_persistent for state in states) + root.gathered_transient
    most = max(played.most_bytes("gradients", "activations"), gradients)
    held = sum(fixed.values()) - base_bytes + (1 + slack) * (most + always_gathered)
    return PeakMemory(peak, {kind: table[kind] for kind in KINDS}, held, played, update)


def running_bytes(call: CallMemory, several: bool) -> float:
    """Return the most that a call allocates while it runs between calls like it, beside what is saved and what stays."""
    step = step_events(several)
    near = Of.HERE, Of.PREVIOUS, Of.NEXT

    def size(term: Term) -> float:
        return term.weight * float(getattr(call if term.field in CALL_FIELDS else call.state, term.field)) * (term.of in near)

    return max(
        sum(map(size, each.terms)) + max(map(size, each.largest), default=0.0)
        for each in (step.forward, *step.backward)
        if not each.at_shared_sum
    )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The bytes of one stage at all events of its step, ``[call, event, kind]``: of the forward, the backward, and the end.
    `occurs`: whether there is such an event, ``[call, event]``. `phases`: of each event."""

    bytes: Any
    occurs: Any
    phases: tuple[str, ...]

    @staticmethod
    def of(calls: Sequence[CallMemory], root: StateMemory, several: bool) -> StepMemory:
        """Play a step of one micro-batch or of `several`."""
        step, count = step_events(several), len(calls)
        played = (_coefficients(several) @ _summands(calls, root)).max(axis=0)
        occurs = numpy.ones((count, len(step.backward) + 2), dtype=bool)
        occurs[1:, -1] = False
        shared = count > 1 and root.unsharded_gradients + root.gradients_in_place > 0
        for number, each in enumerate(step.backward, 1):
            if each.at_shared_sum:
                occurs[int(shared) :, number] = False
        phases = step.forward.phase, *(each.phase for each in step.backward), step.end.phase
        return StepMemory(played.reshape(len(phases), len(VARYING), count).transpose(2, 0, 1), occurs, phases)

    def largest(self) -> MemoryEvent:
        """Return the event with most bytes, the first of several."""
        totals = numpy.where(self.occurs, self.bytes.sum(axis=2), -1.0)
        forward, backward = int(totals[:, 0].argmax()), int(totals[::-1, 1:].argmax())
        call, event = divmod(backward, totals.shape[1] - 1)
        ends = (forward, 0), (len(totals) - 1 - call, event + 1)
        return self._event(*max(ends, key=lambda place: totals[place]))

    def most_bytes(self, *kinds: str) -> float:
        """Return the most bytes of some kinds together at any event."""
        return float(self.bytes[..., [VARYING.index(kind) for kind in kinds]].sum(axis=2)[self.occurs].max())

    def events(self) -> Iterator[MemoryEvent]:
        """Yield all events in their order: forwards, and backwards from the last call to the first."""
        calls, events = range(len(self.bytes)), range(1, len(self.phases))
        places = [(call, 0) for call in calls] + [(call, event) for call in reversed(calls) for event in events]
        yield from (self._event(*place) for place in places if self.occurs[place])

    def _event(self, call: int, event: int) -> MemoryEvent:
        return MemoryEvent(self.phases[event], call, *self.bytes[call, event].tolist())


def _summands(calls: Sequence[CallMemory], root: StateMemory) -> Any:
    """Return what each term sums at each call, ``[of x field, call]`` in the order of `Of` and of the fields."""
    states = [call.state for call in calls]
    here = numpy.array(
        [[getattr(call, name) for call in calls] for name in CALL_FIELDS]
        + [[getattr(state, name) for state in states] for name in STATE_FIELDS],
        dtype=float,
    )
    until, own = here.cumsum(axis=1), len(CALL_FIELDS)
    out = numpy.zeros((len(Of), *here.shape))
    sums = dict(zip(Of, out, strict=True))
    sums[Of.HERE][:] = here
    sums[Of.PREVIOUS][:, 1:] = here[:, :-1]
    sums[Of.NEXT][:, :-1] = here[:, 1:]
    sums[Of.BEFORE][:, 1:] = until[:, :-1]
    sums[Of.UNTIL][:] = until
    sums[Of.AFTER][:, :-1] = here[:, :0:-1].cumsum(axis=1)[:, ::-1]
    sums[Of.ALL][:] = until[:, -1:]
    sums[Of.ROOT][own:] = numpy.array([getattr(root, name) for name in STATE_FIELDS])[:, None]
    sums[Of.ROOT_BUT_LAST][:, :-1] = sums[Of.ROOT][:, 1:]
    return out.reshape(-1, len(calls))


@lru_cache(maxsize=2)
def _coefficients(several: bool) -> Any:
    """Return the weights of all summands in each kind of each event, once with each of the terms of which the largest counts,
    ``[largest, event x kind, of x field]``. A plan's peak is looked for hundreds of times in a search."""
    step, fields, places = step_events(several), (*CALL_FIELDS, *STATE_FIELDS), tuple(Of)
    events = [(step.base, each) for each in (step.forward, *step.backward)] + [((), step.end)]
    out = numpy.zeros((2, len(events), len(VARYING), len(places), len(fields)))
    for number, (base, event) in enumerate(events):
        for choice in range(2):
            for term in (*base, *event.terms, *event.largest[choice : choice + 1]):
                place = VARYING.index(term.kind), places.index(term.of), fields.index(term.field)
                out[(choice, number, *place)] += term.weight
    return out.reshape(2, len(events) * len(VARYING), -1)
