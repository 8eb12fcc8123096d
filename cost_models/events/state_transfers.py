"""The transfers of parameter state in the passes of a step: all-gathers of weights and reductions of gradients, and what each of
them overlaps with.

The order is FSDP2's. The all-gather of the next call overlaps with each call, in the forward and (ZeRO-3) in the backward; the
reduction of a call's gradients overlaps with the next call of the backward, which waits for it at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple

from autopar.cost_models.events.memory_terms import Of
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.state_cost import StateCommunication

GATHER, REDUCTION = "all-gather of weights", "reduction of gradients"
"""Names of transfers on the data axis."""


class Edge(Enum):
    """What becomes of the transfer of the call that has no call to overlap with: the first one of a pass to be gathered, or the
    last one to be reduced."""

    EXPOSED = auto()
    """The pass waits for it."""
    ABSENT = auto()
    """There is none: the weights are still gathered."""
    LEFT = auto()
    """It runs in the next forward, after the gathers there."""


class Transfer(NamedTuple):
    """A transfer of each call in a pass. `field`: of `StateCommunication`, its seconds. `beside`: the neighbour of its call whose
    compute it runs beside, where it `overlaps` at all."""

    name: str
    field: str
    beside: Of
    edge: Edge
    overlaps: bool

    def seconds(self, communication: StateCommunication) -> float:
        """Return the seconds of one call."""
        return float(getattr(communication, self.field))


class PassTransfers(NamedTuple):
    """A pass over all calls: the gather that each call waits for, and the reduction after it (of a backward). `root_gather`,
    `root_reduction`: fields of `StateCommunication` that the group of parameters that several calls share has before and after
    the pass."""

    backward: bool
    gather: Transfer
    reduction: Transfer | None = None
    root_gather: str = ""
    root_reduction: str = ""

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Both transfers of a call."""
        return (self.gather,) if self.reduction is None else (self.gather, self.reduction)


class StepTransfers(NamedTuple):
    """The passes of a step of m micro-batches: the first forward, m - 1 times a backward and a forward after it, and the last
    backward."""

    first_forward: PassTransfers
    forward: PassTransfers
    backward: PassTransfers
    last_backward: PassTransfers

    def counted(self, micro_batches: int) -> Iterator[tuple[int, PassTransfers]]:
        """Yield each pass with how often it occurs."""
        yield from zip((1, micro_batches - 1, micro_batches - 1, 1), self, strict=True)


def step_transfers(overlap: Overlap, pipelined: bool = False) -> StepTransfers:
    """Return the passes of a step. `pipelined`: the backward of a micro-batch does not follow its forward at once, so that the
    last call does not keep its gathered weights between them, nor the first one between a backward and the next forward."""
    prefetch, kept = overlap.parameter_gather, Edge.EXPOSED if pipelined else Edge.ABSENT
    gather = Transfer(GATHER, "gather_each", Of.PREVIOUS, kept, prefetch)
    again = Transfer(GATHER, "gather_backward", Of.NEXT, kept, prefetch)
    reduction = Transfer(REDUCTION, "reduce_each", Of.PREVIOUS, Edge.LEFT, overlap.gradient_reduction)
    if not overlap.gradient_reduction:
        reduction = reduction._replace(edge=Edge.EXPOSED)
    last = reduction._replace(field="reduce_last", edge=Edge.EXPOSED)
    return StepTransfers(
        first_forward=PassTransfers(False, gather._replace(field="gather_first", edge=Edge.EXPOSED), root_gather="gather_first"),
        forward=PassTransfers(False, gather),
        backward=PassTransfers(True, again, reduction, root_reduction="reduce_each"),
        last_backward=PassTransfers(True, again, last, root_reduction="reduce_last"),
    )


class TransferSeconds(NamedTuple):
    """The seconds of transfers on links of the data axis: those that overlap with compute, and those that it waits for."""

    overlapped: float
    exposed: float

    @property
    def sent(self) -> float:
        """The seconds of all."""
        return self.overlapped + self.exposed


def transfer_seconds(
    passes: Iterable[tuple[int, PassTransfers]], communication: StateCommunication, first: bool = False, last: bool = False
) -> TransferSeconds:
    """Return the transfers of one call in some passes, each so many times; `first`, `last`: the call is the first or last one."""
    overlapped = exposed = 0.0
    for count, one in passes:
        for each in one.transfers:
            at_edge = first if each.beside is Of.PREVIOUS else last
            seconds = count * each.seconds(communication)
            if at_edge:
                overlapped += seconds if each.edge is Edge.LEFT else 0.0
                exposed += seconds if each.edge is Edge.EXPOSED else 0.0
            elif each.overlaps:
                overlapped += seconds
            else:
                exposed += seconds
    return TransferSeconds(overlapped, exposed)
