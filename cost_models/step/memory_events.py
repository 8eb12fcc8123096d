"""Peak memory of a device: the events of a training step at which memory may peak, and the table of the largest one.

They are those of `events.memory_terms`, which the solver's linear model (``solve.ilp.memory_events``) sums: here with running
sums, since a search looks for hundreds of peaks, and without arrays, since whoever reads a plan imports none.
The order of events is that of the runtime (FSDP2, gradient buckets, autograd), checked against the program itself by dry runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.events.memory_terms import CALL_FIELDS, CallMemory, Of, Term, step_events
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
    events = (*_forward_events(calls, root, micro_batches), *_backward_events(calls, root, micro_batches), update)
    peak = max(events, key=lambda event: event.total_bytes)
    table = fixed | {kind: getattr(peak, kind) for kind in VARYING}
    table["slack"] = slack * peak.total_bytes
    kept = max(event.gradients + event.activations for event in events) + _always_gathered(calls, root)
    held = sum(fixed.values()) - base_bytes + (1 + slack) * kept
    return PeakMemory(peak, {kind: table[kind] for kind in KINDS}, events, held)


def _always_gathered(calls: Sequence[CallMemory], root: StateMemory) -> float:
    """Return the weights that stay gathered from forward to backward."""
    return root.gathered + sum(call.state.gathered for call in calls if not call.state.gathered_is_transient)


def _transient(state: StateMemory) -> float:
    """Return the weights that are gathered while the call computes (ZeRO-3)."""
    return state.gathered if state.gathered_is_transient else 0.0


def _accumulated(calls: Sequence[CallMemory], root: StateMemory, micro_batches: int) -> float:
    """Return the gradients (and buffers) that are there before a backward, after the first micro-batch."""
    states = [*(call.state for call in calls), root]
    return sum(state.accumulated * (state.persistent_reduce_buffer + (micro_batches > 1)) for state in states)


def _forward_events(calls: Sequence[CallMemory], root: StateMemory, micro_batches: int) -> Iterator[MemoryEvent]:
    """Yield the events of the forward of call i: what earlier calls saved, all that this forward allocates, its gathered weights
    and the flat buffer that they are gathered into. (After the first micro-batch, weights that stay gathered are not gathered
    again.)"""
    gathered, gradients = _always_gathered(calls, root), _accumulated(calls, root, micro_batches)
    saved = sum(call.earlier for call in calls)
    for index, call in enumerate(calls):
        kept_gathered = micro_batches > 1 and not call.state.gathered_is_transient
        yield MemoryEvent(
            phase="forward",
            call=index,
            gradients=gradients,
            gathered=gathered + _transient(call.state),
            activations=saved,
            temporaries=call.forward_bytes,
            collectives=0.0 if kept_gathered else call.state.gathered,
        )
        saved += call.latest


def _backward_events(calls: Sequence[CallMemory], root: StateMemory, micro_batches: int) -> Iterator[MemoryEvent]:
    """Yield the events of the backward of call i: its weights are gathered again (gather); then all that calls up to i saved, its
    working set, the buffer in which the gradients of call i + 1 are being reduced, and the weights of the call and of the one
    that is prefetched. At its end (reduction) the call's saved tensors are free; its unsharded gradients, and the buffer that
    they are reduced in, are there.

    Shared weights get their first gradient in the last call's backward, hold it until the first call's, where another is added to
    it (autograd allocates the sum), and are reduced then.
    """
    always_gathered = _always_gathered(calls, root)
    transient = [_transient(call.state) for call in calls]
    before = _accumulated(calls, root, micro_batches)
    saved = sum(call.earlier for call in calls)
    for call in calls:
        saved += call.latest
    reduced = shared = reducing = 0.0

    def event(phase: str, call: int, gathered: float, temporaries: float, collectives: float) -> MemoryEvent:
        return MemoryEvent(
            phase=phase,
            call=call,
            gradients=before + reduced,
            gathered=gathered,
            activations=saved,
            temporaries=temporaries,
            collectives=collectives,
        )

    root_gradients = root.unsharded_gradients + (root.gradients if root.reduced_in_place else 0.0)
    for index in reversed(range(len(calls))):
        call, state = calls[index], calls[index].state
        weights = always_gathered + sum(transient[max(0, index - 1) : index + 1])
        left = call.input_gradient_bytes
        yield event("gather", index, always_gathered + transient[index], left + shared, transient[index] + reducing)
        yield event("backward", index, weights, call.backward_bytes + shared, reducing)
        if shared and index == 0:
            yield event("backward", index, weights, left + 3 * shared, reducing)
        saved -= call.latest
        shared = root_gradients
        unreduced, new = _gradients(state, micro_batches)
        reduced += new if state.reduced_in_place else 0.0
        leaving = max(_freed_reduce_buffer(state), reducing)
        yield event("reduction", index, weights - transient[index], left + unreduced + shared, leaving)
        reduced += 0.0 if state.reduced_in_place else new
        reducing = 0.0 if state.reduced_in_place else state.reduce_buffer
    unreduced, _ = _gradients(root, micro_batches)
    yield event("reduction", 0, root.gathered, max(shared, unreduced), max(_freed_reduce_buffer(root), reducing))


def _freed_reduce_buffer(state: StateMemory) -> float:
    return 0.0 if state.persistent_reduce_buffer else state.reduce_buffer


def _gradients(state: StateMemory, micro_batches: int) -> tuple[float, float]:
    """Return, when the backward of a call ends, (gradients to be reduced or accumulated, gradients that stay)."""
    if state.persistent_reduce_buffer or (state.reduced_in_place and micro_batches > 1):
        return state.unsharded_gradients + state.gradients, 0.0
    return state.unsharded_gradients, state.gradients if micro_batches == 1 else 0.0


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
