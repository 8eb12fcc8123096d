"""Peak memory of a device: the events of a training step at which memory may peak, and the table of the largest one.

They are those of `events.memory_terms`, which the solver's linear model (``solve.ilp.memory_events``) sums too. Here a term is
summed for all calls at once, since a search looks for hundreds of peaks, and without arrays, since whoever reads a plan imports
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.cost_models.events.memory_terms import CALL_FIELDS, CallMemory, EventTerms, Of, Term, step_events
from autopar.cost_models.state.state_memory import StateMemory, update_temporaries

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


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """The bytes at one moment of the step.

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
    """The bytes by kind at the largest event, whose sum is the peak; `events` are all of the step. `held_bytes`: the most that
    stays when its forward, a backward or the optimizer has ended: state, gradients, and what is saved for a backward."""

    event: MemoryEvent
    table: dict[str, float]
    events: tuple[MemoryEvent, ...] = ()
    held_bytes: float = 0.0


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
    update = MemoryEvent(
        phase="optimizer",
        call=-1,
        gradients=sum(state.gradients for state in states),
        gathered=0.0,
        activations=0.0,
        temporaries=update_temporaries(states, foreach),
    )
    events = (*_call_events(calls, root, micro_batches > 1), update)
    peak = max(events, key=lambda event: event.total_bytes)
    table = fixed | {kind: getattr(peak, kind) for kind in VARYING}
    table["slack"] = slack * peak.total_bytes
    always_gathered = root.gathered + sum(call.state.gathered_persistent for call in calls)
    kept = max(event.gradients + event.activations for event in events) + always_gathered
    held = sum(fixed.values()) - base_bytes + (1 + slack) * kept
    return PeakMemory(peak, {kind: table[kind] for kind in KINDS}, events, held)


def _call_events(calls: Sequence[CallMemory], root: StateMemory, several: bool) -> Iterator[MemoryEvent]:
    """Yield the events of `step_events` at every call: the forwards, and the backwards from the last call to the first."""
    step, columns = step_events(several), _Columns(calls, root)
    shared = len(calls) > 1 and root.unsharded_gradients + root.gradients_in_place > 0
    backward = [(each, columns.of(each, step.base)) for each in step.backward if shared or not each.at_shared_sum]
    for index, row in enumerate(columns.of(step.forward, step.base)):
        yield MemoryEvent(step.forward.phase, index, *row)
    for index in reversed(range(len(calls))):
        for each, rows in backward:
            if index == 0 or not each.at_shared_sum:
                yield MemoryEvent(each.phase, index, *rows[index])
    yield MemoryEvent(step.end.phase, 0, *columns.of(step.end)[0])


class _Columns:
    """The terms of events in lists, a number for each call. Most fields are 0 at all calls, and take no sums then."""

    def __init__(self, calls: Sequence[CallMemory], root: StateMemory) -> None:
        self.calls, self.root = calls, root
        self._known: dict[tuple[str, Of], list[float]] = {}

    def of(self, event: EventTerms, base: Sequence[Term] = ()) -> list[tuple[float, ...]]:
        """Return the bytes of an event at each call by kind, as in `VARYING`, with what is there at all events."""
        out = {kind: [0.0] * len(self.calls) for kind in VARYING}
        for term in (*base, *event.terms):
            self._add(out, term.kind, term.weight, self._column(term))
        if event.largest:
            self._add(out, event.largest[0].kind, 1.0, list(map(max, *map(self._column, event.largest))))
        return list(zip(*out.values(), strict=True))

    @staticmethod
    def _add(out: dict[str, list[float]], kind: str, weight: float, column: Sequence[float]) -> None:
        if any(column):
            out[kind] = [before + weight * each for before, each in zip(out[kind], column, strict=True)]

    def _column(self, term: Term) -> list[float]:
        key = term.field, term.of
        if key not in self._known:
            if term.of in (Of.ROOT, Of.ROOT_BUT_LAST):
                self._known[key] = [float(getattr(self.root, term.field))] * len(self.calls)
                self._known[key][-1] *= term.of is Of.ROOT
            else:
                parts = self.calls if term.field in CALL_FIELDS else [call.state for call in self.calls]
                self._known[key] = _OVER_CALLS[term.of]([float(getattr(part, term.field)) for part in parts])
        return self._known[key]


_OVER_CALLS: Mapping[Of, Callable[[list[float]], list[float]]] = {
    Of.HERE: lambda each: each,
    Of.PREVIOUS: lambda each: [0.0, *each[:-1]],
    Of.NEXT: lambda each: [*each[1:], 0.0],
    Of.BEFORE: lambda each: [0.0, *accumulate(each[:-1])],
    Of.UNTIL: lambda each: list(accumulate(each)),
    Of.AFTER: lambda each: [*accumulate(each[:0:-1], initial=0.0)][::-1],
    Of.ALL: lambda each: [sum(each)] * len(each),
}


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
