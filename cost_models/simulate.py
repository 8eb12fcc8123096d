"""The clock of one micro-batch after another on one device: calls on the main stream, transfers of the data axis behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.overlap import Overlap
from autopar.cost_models.streams import Streams
from autopar.cost_models.trace import Segment
from autopar.cost_models.traffic import Traffic

Reading = tuple[float, float, float]
"""Start, seconds, and how many of these the main stream stood still for the data axis."""


@dataclass(frozen=True, slots=True)
class Part:
    """One call: its segments, forward and backward, and the traffic of the parameters that are its own."""

    forward: Sequence[Segment]
    backward: Sequence[Segment]
    traffic: Traffic


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward of all parts. `calls` are in the order of the parts, `tail_seconds` what the main stream waited for
    after the last of them (part of `seconds`)."""

    calls: tuple[Reading, ...]
    seconds: float
    waited_seconds: float
    tail_seconds: float


@dataclass(frozen=True, slots=True)
class Steps:
    """First forward, later forwards, backwards but the last, last backward. Of one micro-batch, the middle two are the others."""

    first_forward: Pass
    forward: Pass
    backward: Pass
    last_backward: Pass
    micro_batches: int

    @property
    def forward_seconds(self) -> float:
        """All forwards of the step."""
        return self.first_forward.seconds + (self.micro_batches - 1) * self.forward.seconds

    @property
    def backward_seconds(self) -> float:
        return self.last_backward.seconds + (self.micro_batches - 1) * self.backward.seconds

    @property
    def waited_seconds(self) -> float:
        later = self.forward.waited_seconds + self.backward.waited_seconds
        return self.first_forward.waited_seconds + self.last_backward.waited_seconds + (self.micro_batches - 1) * later


def simulate(
    parts: Sequence[Part],
    root: Traffic,
    links: frozenset[str],
    micro_batches: int = 1,
    alone: bool = True,
    overlap: Overlap | None = None,
    sent_seconds: float = 0.0,
) -> Steps:
    """One step, `root` being the parameters that several parts share. `links` are the physical links of the data axis.

    Only the first micro-batch and the last are simulated: whatever is between repeats the forward of the last and the backward
    of the first, since nothing but the reduction of a fixed size is handed from one to the next. `alone`: a micro-batch's
    backward follows its forward at once, so the part at the turn keeps its weights; not so in a pipeline. `overlap` says what
    hides behind the main stream, `sent_seconds` how long each pass uses the links of the data axis to talk to other stages.
    """
    overlap = overlap or Overlap()
    clock = _Clock(parts, root, Streams(links, overlap.contention), alone, overlap, sent_seconds)
    first = clock.forward(first=True)
    if micro_batches == 1:
        last = clock.backward(last=True)
        return Steps(first, first, last, last, 1)
    backward = clock.backward(last=False)
    forward = clock.forward(first=False)
    return Steps(first, forward, backward, clock.backward(last=True), micro_batches)


@dataclass(slots=True)
class _Clock:
    """Weights of the next call are gathered behind each call, forward and (ZeRO-3) again backward; gradients of a call are
    reduced behind the next call of the backward and waited for at its end. The first gather and the last reduction stand
    alone; those behind a backward that another forward follows run behind that, after its gathers. The last call keeps its
    weights from forward to backward, the first one from a backward to the next forward: they would be gathered at once again."""

    parts: Sequence[Part]
    root: Traffic
    streams: Streams
    alone: bool
    overlap: Overlap
    sent_seconds: float
    _gathered: int = field(default=0)

    def forward(self, first: bool) -> Pass:
        streams, parts = self.streams, self.parts
        begin, stood = streams.clock, streams.waited
        streams.behind(self.sent_seconds)

        def gather(index: int) -> int:
            traffic = parts[index].traffic
            return streams.issue(traffic.gather_first if first else traffic.gather_later)

        if first:
            streams.wait(streams.issue(self.root.gather_first))
        kept = self.alone and not first
        self._gathered = 0 if kept else gather(0)
        readings = []
        for index, part in enumerate(parts):
            start, waited = streams.clock, streams.waited
            if index and not self.overlap.gathers_behind:
                streams.expose(part.traffic.gather_first if first else part.traffic.gather_later)
            streams.wait(self._gathered)
            if index + 1 < len(parts) and self.overlap.gathers_behind:
                self._gathered = gather(index + 1)
            for seconds, links in part.forward:
                streams.run(seconds, links)
            readings.append((start, streams.clock - start, streams.waited - waited))
        end = streams.clock
        streams.settle()
        return Pass(tuple(readings), streams.clock - begin, streams.waited - stood, streams.clock - end)

    def backward(self, last: bool) -> Pass:
        streams, parts = self.streams, self.parts
        begin, stood = streams.clock, streams.waited
        streams.behind(self.sent_seconds)
        if not self.alone:
            self._gathered = streams.issue(parts[-1].traffic.gather_backward)
        reduction, readings, later = 0, [], self.root.reduce_last if last else self.root.reduce_each
        for index in range(len(parts) - 1, -1, -1):
            part = parts[index]
            start, waited = streams.clock, streams.waited
            if index + 1 < len(parts) and not self.overlap.gathers_behind:
                streams.expose(part.traffic.gather_backward)
            streams.wait(self._gathered)
            if index and self.overlap.gathers_behind:
                self._gathered = streams.issue(parts[index - 1].traffic.gather_backward)
            for seconds, links in part.backward:
                streams.run(seconds, links)
            streams.run(part.traffic.accumulate_seconds + (0.0 if index else self.root.accumulate_seconds))
            if not self.overlap.reductions_queue:
                streams.wait(reduction)
            reduce = part.traffic.reduce_last if last else part.traffic.reduce_each
            if self.overlap.reductions_behind and (index or last):
                reduction = streams.issue(reduce)
            else:
                later += reduce
            readings.append((start, streams.clock - start, streams.waited - waited))
        end = streams.clock
        if last or not self.overlap.reductions_behind:
            streams.wait(streams.issue(later))
        else:
            streams.behind(later)
        return Pass(tuple(readings[::-1]), streams.clock - begin, streams.waited - stood, streams.clock - end)
