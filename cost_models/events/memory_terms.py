"""The events of a training step at which memory may peak, each a sum of terms: bytes of a call, of its neighbours, of all calls
before it.

The order is that of the runtime (FSDP2, gradient buckets, autograd), checked against the program itself by dry runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from autopar.cost_models.state.state_memory import StateMemory


class Of(Enum):
    """The calls whose bytes a term sums, seen from the call that runs; ROOT: the group of parameters that several calls share."""

    HERE = auto()
    PREVIOUS = auto()
    NEXT = auto()
    BEFORE = auto()
    """All calls before it in the forward."""
    UNTIL = auto()
    """Those, and itself."""
    AFTER = auto()
    """All calls after it, whose backward has ended."""
    ALL = auto()
    ROOT = auto()
    ROOT_BUT_LAST = auto()
    """The root, unless the call is the last one."""


class Term(NamedTuple):
    """``weight`` times a field of `CallMemory` or of its `StateMemory`, summed over some calls; `kind` is one of `VARYING`."""

    kind: str
    field: str
    of: Of
    weight: float = 1.0


class EventTerms(NamedTuple):
    """An event of the step at every call. Of `largest`, two terms or none, only the larger one counts. `at_shared_sum`: it occurs
    at the first call alone, where trained parameters are shared with later ones."""

    phase: str
    terms: tuple[Term, ...]
    largest: tuple[Term, ...] = ()
    at_shared_sum: bool = False


class StepEvents(NamedTuple):
    """The events of a step before the optimizer's update: each call's forward, then those of each call's backward; at the `end`
    that of the first call has ended. `base` is there at all of `forward` and `backward`."""

    base: tuple[Term, ...]
    forward: EventTerms
    backward: tuple[EventTerms, ...]
    end: EventTerms


@dataclass(frozen=True, slots=True)
class CallMemory:
    """The memory of one call on a stage.

    saved_bytes: activations of all its micro-batches in flight.
    forward_bytes: all that its forward allocates, saved or not.
    backward_bytes: working set of its backward, beside saved tensors.
    input_gradient_bytes: gradients of its inputs, which are left when its backward ends.
    state: of its own parameters.
    latest_saved_bytes: the part of `saved_bytes` that is of the micro-batch whose forward runs (None: all of it).
    """

    saved_bytes: float
    forward_bytes: float
    backward_bytes: float
    input_gradient_bytes: float
    state: StateMemory
    latest_saved_bytes: float | None = None

    @property
    def latest(self) -> float:
        """Bytes saved of the micro-batch whose forward runs."""
        return self.saved_bytes if self.latest_saved_bytes is None else self.latest_saved_bytes

    @property
    def earlier(self) -> float:
        """Bytes saved of the other micro-batches in flight."""
        return self.saved_bytes - self.latest


CALL_FIELDS = "latest", "earlier", "forward_bytes", "backward_bytes", "input_gradient_bytes"
STATE_FIELDS = (
    "gathered_persistent", "gathered_transient", "gradients", "persistent_gradients", "gradients_in_place", "unsharded_gradients",
    "freed_reduce_buffer", "overlapped_reduce_buffer", "accumulated",
)  # fmt: skip
"""The fields of terms: those of a call, and those of its state."""

_ROOT_GRADIENTS = "unsharded_gradients", "gradients_in_place"


def held_terms(several: bool) -> tuple[Term, ...]:
    """Return what each group of parameters holds from the first forward to the last backward of a step of one or `several`
    micro-batches, beside weights and optimizer: weights that stay gathered, and gradients of the micro-batches before (or their
    buffers, where those are never freed)."""
    fields = [("gathered", "gathered_persistent"), ("gradients", "persistent_gradients")]
    if several:
        fields.append(("gradients", "accumulated"))
    return tuple(Term(kind, field, Of.ALL) for kind, field in fields)


def held_bytes(state: StateMemory, several: bool) -> float:
    """Return the sum of `held_terms` of one group."""
    return sum(each.weight * float(getattr(state, each.field)) for each in held_terms(several))


@cache
def step_events(several: bool) -> StepEvents:
    """Return the events of a step of one or `several` micro-batches.

    Forward of a call: what earlier calls saved, all that it allocates, its gathered weights and the flat buffer that they are
    gathered into. (After the first micro-batch, weights that stay gathered are not gathered again.)

    Backward: its weights are gathered again (gather); then all that calls up to it saved, its working set, the buffer in which
    the gradients of the next call are being reduced, and the weights of the call and of the previous one, which are prefetched.
    At its end (reduction) its saved tensors are free; its unsharded gradients, and the buffer that they are reduced in, are
    there.

    Shared weights get their first gradient in the last call's backward, hold it until the first call's, where another is added to
    it (autograd allocates the sum), and are reduced then.
    """
    of_root = tuple(each._replace(of=Of.ROOT) for each in held_terms(several))
    transient_root = Term("gathered", "gathered_transient", Of.ROOT)
    earlier = Term("activations", "earlier", Of.ALL)
    base = (*held_terms(several), *of_root, transient_root, earlier)
    weights, prefetched = (Term("gathered", "gathered_transient", of) for of in (Of.HERE, Of.PREVIOUS))
    reducing = Term("collectives", "overlapped_reduce_buffer", Of.NEXT)
    saved, left = Term("activations", "latest", Of.UNTIL), Term("temporaries", "input_gradient_bytes", Of.HERE)
    flat_buffer = Term("collectives", "gathered_transient", Of.HERE)
    reduced = () if several else _gradients_that_stay(Of.AFTER)

    def shared(of: Of, weight: float = 1.0) -> tuple[Term, ...]:
        return tuple(Term("temporaries", field, of, weight) for field in _ROOT_GRADIENTS)

    forward = EventTerms("forward", (
        weights,
        Term("activations", "latest", Of.BEFORE),
        Term("temporaries", "forward_bytes", Of.HERE),
        flat_buffer,
        *(() if several else (Term("collectives", "gathered_persistent", Of.HERE),)),
    ))  # fmt: skip
    gather = EventTerms("gather", (*reduced, weights, saved, left, *shared(Of.ROOT_BUT_LAST), flat_buffer, reducing))
    working = Term("temporaries", "backward_bytes", Of.HERE)
    backward = EventTerms("backward", (*reduced, weights, prefetched, saved, working, *shared(Of.ROOT_BUT_LAST), reducing))
    # another gradient is added to that of the shared weights, and allocates the sum
    shared_sum = EventTerms("backward", (*reduced, weights, saved, left, *shared(Of.ROOT, 3.0), reducing), at_shared_sum=True)
    reduction = EventTerms(
        "reduction",
        (
            *reduced,
            *_gradients_in_place(several),
            prefetched,
            Term("activations", "latest", Of.BEFORE),
            left,
            Term("temporaries", "unsharded_gradients", Of.HERE),
            *shared(Of.ROOT),
        ),
        (Term("collectives", "freed_reduce_buffer", Of.HERE), reducing),
    )
    end = EventTerms(
        "reduction",
        (*held_terms(several)[1:], *of_root, transient_root, earlier, *(() if several else _gradients_that_stay(Of.ALL)),
         *shared(Of.ROOT)),
        (Term("collectives", "freed_reduce_buffer", Of.ROOT), reducing._replace(of=Of.HERE)),
    )  # fmt: skip
    return StepEvents(base, forward, (gather, backward, shared_sum, reduction), end)


def _gradients_that_stay(of: Of) -> tuple[Term, ...]:
    """Return the gradients of calls after their reduction; those in buffers that are never freed are in the base."""
    return Term("gradients", "gradients", of), Term("gradients", "persistent_gradients", of, -1.0)


def _gradients_in_place(several: bool) -> tuple[Term, ...]:
    """Return the gradients that take the place of the unsharded ones: of several micro-batches they are to be added to the sum,
    of one they stay (in a buffer that is never freed, or not)."""
    if several:
        return (Term("temporaries", "gradients_in_place", Of.HERE),)
    in_buffer = Term("gradients", "persistent_gradients", Of.HERE, -1.0)
    return Term("gradients", "gradients_in_place", Of.HERE), in_buffer, Term("temporaries", "persistent_gradients", Of.HERE)
