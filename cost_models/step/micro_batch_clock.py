"""The clock of the micro-batches of one model chunk on one device: calls on the main stream, FSDP communication overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.events.state_transfers import GATHER, REDUCTION, Edge, PassTransfers, step_transfers
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.state.state_cost import StateCommunication
from autopar.cost_models.step.call_trace import Segment
from autopar.cost_models.step.streams import StreamRecord, Streams, StreamSpan


@dataclass(frozen=True, slots=True)
class CallSegments:
    """The segments of one call: its segments on the main stream, and the communication of the parameters that it alone uses."""

    forward: Sequence[Segment]
    backward: Sequence[Segment]
    communication: StateCommunication


@dataclass(frozen=True, slots=True)
class MicroBatchPass:
    """A forward or backward of all calls.

    stall_seconds: part of `seconds` in which the main stream waits for the data axis.
    tail_seconds: part of `stall_seconds` that comes after the last call.
    spans: what the streams do, from the beginning of the pass, where that is recorded.
    """

    seconds: float
    stall_seconds: float
    tail_seconds: float
    spans: tuple[StreamSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPasses:
    """The passes of one step: first forward, each later forward, each backward but the last, last backward. With one micro-batch
    `forward` is the first one, and `backward` the last one."""

    first_forward: MicroBatchPass
    forward: MicroBatchPass
    backward: MicroBatchPass
    last_backward: MicroBatchPass
    micro_batches: int

    @property
    def forward_seconds(self) -> float:
        """The seconds of all forwards of the step."""
        return self.first_forward.seconds + (self.micro_batches - 1) * self.forward.seconds

    @property
    def backward_seconds(self) -> float:
        """The seconds of all backwards of the step."""
        return self.last_backward.seconds + (self.micro_batches - 1) * self.backward.seconds

    @property
    def stall_seconds(self) -> float:
        """The stalls of all passes of the step."""
        others = self.forward.stall_seconds + self.backward.stall_seconds
        return self.first_forward.stall_seconds + self.last_backward.stall_seconds + (self.micro_batches - 1) * others


def simulate_step(
    calls: Sequence[CallSegments],
    root: StateCommunication,
    links: frozenset[str],
    micro_batches: int = 1,
    *,
    pipelined: bool = False,
    overlap: Overlap | None = None,
    sent_seconds: float = 0.0,
    record: bool = False,
) -> StepPasses:
    """Simulate one step of these calls.

    root: communication of the parameters that several calls share.
    links: physical links of the data axis.
    pipelined: the backward of a micro-batch does not follow its forward at once (`step_transfers`).
    overlap: what may overlap with the main stream.
    sent_seconds: p2p transfers to other stages in each pass, on the links of the data axis.
    record: whether the passes have `spans`.

    Only the first and the last micro-batch are simulated. Every other one repeats the forward of the last and the backward of the
    first, since all that one hands to the next is a reduction of fixed size.
    """
    overlap = overlap or Overlap()
    streams = Streams(links, overlap.contention, record=StreamRecord() if record else None)
    clock, order = _StepClock(calls, root, streams, overlap.gradient_buffers, sent_seconds), step_transfers(overlap, pipelined)
    first = clock.play(order.first_forward)
    if micro_batches == 1:
        last = clock.play(order.last_backward)
        return StepPasses(first, first, last, last, 1)
    backward, forward = clock.play(order.backward), clock.play(order.forward)
    return StepPasses(first, forward, backward, clock.play(order.last_backward), micro_batches)


@dataclass(slots=True)
class _StepClock:
    """The clock of a step, which plays its passes (`cost_models.events.state_transfers`)."""

    calls: Sequence[CallSegments]
    root: StateCommunication
    streams: Streams
    gradient_buffers: bool
    sent_seconds: float

    def play(self, one: PassTransfers) -> MicroBatchPass:
        """Play one pass over all calls."""
        streams, calls = self.streams, self.calls
        begin, stalled = streams.clock_seconds, streams.stall_seconds
        streams.issue_background(self.sent_seconds)
        if one.root_gather:
            streams.wait(streams.issue(getattr(self.root, one.root_gather), GATHER))
        order = range(len(calls) - 1, -1, -1) if one.backward else range(len(calls))
        gathers = [one.gather.seconds(call.communication) for call in calls]
        gather = streams.issue(gathers[order[0]], GATHER, order[0]) if one.gather.edge is Edge.EXPOSED else 0
        reduction, left_over = 0, getattr(self.root, one.root_reduction) if one.root_reduction else 0.0
        for index, following in zip(order, [*order[1:], None], strict=True):
            call = calls[index]
            if streams.record is not None:
                streams.record.call = index
            if not one.gather.overlaps and index != order[0]:
                streams.run_exposed(gathers[index])
            streams.wait(gather)
            if one.gather.overlaps and following is not None:
                gather = streams.issue(gathers[following], GATHER, following)
            for seconds, links in call.backward if one.backward else call.forward:
                streams.run(seconds, links)
            if one.reduction is None:
                continue
            streams.run(call.communication.accumulate_seconds + (self.root.accumulate_seconds if following is None else 0.0))
            if not self.gradient_buffers:
                streams.wait(reduction)
            reduce_seconds = one.reduction.seconds(call.communication)
            if one.reduction.overlaps and (following is not None or one.reduction.edge is Edge.EXPOSED):
                reduction = streams.issue(reduce_seconds, REDUCTION, index)
            else:
                left_over += reduce_seconds
        end = streams.clock_seconds
        if one.reduction is None:
            streams.wait_for_all()
        elif one.reduction.edge is Edge.LEFT:
            streams.issue_background(left_over)
        else:
            streams.wait(streams.issue(left_over, REDUCTION))
        return self._since(begin, stalled, end)

    def _since(self, begin: float, stalled: float, end_of_calls: float) -> MicroBatchPass:
        streams = self.streams
        spans = streams.record.pass_ends(streams.clock_seconds) if streams.record is not None else ()
        return MicroBatchPass(
            seconds=streams.clock_seconds - begin,
            stall_seconds=streams.stall_seconds - stalled,
            tail_seconds=streams.clock_seconds - end_of_calls,
            spans=tuple(
                each._replace(start_seconds=each.start_seconds - begin, end_seconds=each.end_seconds - begin) for each in spans
            ),
        )
