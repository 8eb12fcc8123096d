"""The clock of the micro-batches of one model chunk on one device: calls on the main stream, FSDP communication overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.hardware.overlap import Overlap
from autopar.cost_models.state.state_communication import StateCommunication
from autopar.cost_models.step.call_trace import Segment
from autopar.cost_models.step.streams import StreamRecord, Streams, StreamSpan

GATHER, REDUCTION = "all-gather of weights", "reduction of gradients"
"""Names of transfers on the data axis."""


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
    pipelined: the backward of a micro-batch does not follow its forward at once, so the last call does not keep its gathered
        weights between them.
    overlap: what may overlap with the main stream.
    sent_seconds: p2p transfers to other stages in each pass, on the links of the data axis.
    record: whether the passes have `spans`.

    Only the first and the last micro-batch are simulated. Every other one repeats the forward of the last and the backward of the
    first, since all that one hands to the next is a reduction of fixed size.
    """
    overlap = overlap or Overlap()
    clock = _StepClock(
        calls=calls,
        root=root,
        streams=Streams(links, overlap.contention, record=StreamRecord() if record else None),
        pipelined=pipelined,
        overlap=overlap,
        sent_seconds=sent_seconds,
    )
    first = clock.forward(first=True)
    if micro_batches == 1:
        last = clock.backward(last=True)
        return StepPasses(first, first, last, last, 1)
    backward = clock.backward(last=False)
    forward = clock.forward(first=False)
    return StepPasses(first, forward, backward, clock.backward(last=True), micro_batches)


@dataclass(slots=True)
class _StepClock:
    """The clock of a step in FSDP2's order of communication. The all-gather of the next call overlaps with each call, in the
    forward and (ZeRO-3) in the backward; the reduction of a call's gradients overlaps with the next call of the backward, which
    waits for it at its end. The first gather and the last reduction are exposed. Reductions that a backward leaves over run in
    the next forward, after its gathers. Between forward and backward the last call keeps its gathered weights, and between a
    backward and the next forward the first one does."""

    calls: Sequence[CallSegments]
    root: StateCommunication
    streams: Streams
    pipelined: bool
    overlap: Overlap
    sent_seconds: float
    _gather: int = field(default=0)
    """Ticket of the all-gather that the next call waits for."""

    def forward(self, first: bool) -> MicroBatchPass:
        streams, calls, prefetch = self.streams, self.calls, self.overlap.parameter_gather
        begin, stalled = streams.clock_seconds, streams.stall_seconds
        streams.issue_background(self.sent_seconds)
        gathers = [each.communication.gather_first if first else each.communication.gather_each for each in calls]
        if first:
            streams.wait(streams.issue(self.root.gather_first, GATHER))
        still_gathered = not self.pipelined and not first
        self._gather = 0 if still_gathered else streams.issue(gathers[0], GATHER, 0)
        for index, call in enumerate(calls):
            if streams.record is not None:
                streams.record.call = index
            if index and not prefetch:
                streams.run_exposed(gathers[index])
            streams.wait(self._gather)
            if index + 1 < len(calls) and prefetch:
                self._gather = streams.issue(gathers[index + 1], GATHER, index + 1)
            for seconds, links in call.forward:
                streams.run(seconds, links)
        end = streams.clock_seconds
        streams.wait_for_all()
        return self._since(begin, stalled, end)

    def backward(self, last: bool) -> MicroBatchPass:
        streams, calls, prefetch = self.streams, self.calls, self.overlap.parameter_gather
        begin, stalled = streams.clock_seconds, streams.stall_seconds
        streams.issue_background(self.sent_seconds)
        if self.pipelined:
            self._gather = streams.issue(calls[-1].communication.gather_backward, GATHER, len(calls) - 1)
        reduction, left_over = 0, self.root.reduce_last if last else self.root.reduce_each
        for index in range(len(calls) - 1, -1, -1):
            call = calls[index]
            if streams.record is not None:
                streams.record.call = index
            if index + 1 < len(calls) and not prefetch:
                streams.run_exposed(call.communication.gather_backward)
            streams.wait(self._gather)
            if index and prefetch:
                self._gather = streams.issue(calls[index - 1].communication.gather_backward, GATHER, index - 1)
            for seconds, links in call.backward:
                streams.run(seconds, links)
            streams.run(call.communication.accumulate_seconds + (0.0 if index else self.root.accumulate_seconds))
            if not self.overlap.gradient_buffers:
                streams.wait(reduction)
            reduce_seconds = call.communication.reduce_last if last else call.communication.reduce_each
            if self.overlap.gradient_reduction and (index or last):
                reduction = streams.issue(reduce_seconds, REDUCTION, index)
            else:
                left_over += reduce_seconds
        end = streams.clock_seconds
        if last or not self.overlap.gradient_reduction:
            streams.wait(streams.issue(left_over, REDUCTION))
        else:
            streams.issue_background(left_over)
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
