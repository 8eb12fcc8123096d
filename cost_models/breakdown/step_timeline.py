"""The predicted step as spans: what each pipeline stage's main stream and communication stream do, and when; and when each
pipeline rank runs each action of its schedule.

The clock is the evaluator's: the spans of a pass are recorded by its streams (`step.streams`), those of a pipeline's actions by
its schedule's clock. A span's stage ends where `StageTime` ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_models.events.state_transfers import REDUCTION
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.chunk_costs import ChunkCost, chunk_costs
from autopar.cost_models.step.evaluate import Evaluation, evaluate, stage_traces
from autopar.cost_models.step.micro_batch_clock import MicroBatchPass
from autopar.cost_models.step.stage_times import schedule_times
from autopar.cost_models.step.streams import StreamSpan
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.schedule import BACKWARD, FORWARD
from autopar.schedules.check import most_in_flight
from autopar.schedules.clock import ActionSpan, ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.shared_cores import SharedCores

_PRECISION = 1e-9


class StageSpan(NamedTuple):
    """A span of a stage's main stream: the pass of a micro-batch through a model chunk (`action` as a schedule writes it, ``F``,
    ``B``, ``I`` or ``W``), ``reduction`` after the last of them, or ``optimizer``."""

    action: str
    chunk: int
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """The timeline of a stage. `passes` are in the order of `spans`: what the streams do inside, in seconds of the step (empty
    where the clock does not say: a backward in two parts, ranks that share cores)."""

    spans: tuple[StageSpan, ...]
    passes: tuple[tuple[StreamSpan, ...], ...]
    end_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of a step, with the evaluation that it belongs to, the traces of blocks on each stage and the costs of all
    model chunks. `flushed` is false for a pipeline of two weight versions: its stages have one batch of many here, which ends
    later than a step takes."""

    evaluation: Evaluation
    traces: tuple[Mapping[str, CallTrace], ...]
    chunks: tuple[ChunkCost, ...]
    stages: tuple[StageTimeline, ...]
    flushed: bool = True
    shared_cores: bool = False


def step_timeline(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> StepTimeline:
    """Return the spans of one step, and what they were computed from. PlanError where the candidate's schedule is none."""
    traces = stage_traces(graph, candidate, cluster)
    evaluation = evaluate(graph, candidate, cluster, optimizer, {name: trace.costs for name, trace in traces[0].items()})
    costs = chunk_costs(graph, candidate, cluster, traces, optimizer_named(optimizer), record=True)
    if len(costs) == 1:
        actions = [list(_passes_in_order(costs[0], candidate.micro_batches))]
    else:
        actions = [_with_passes(rank.spans, costs) for rank in chunks_timeline(candidate, cluster, costs).ranks]
    stages = []
    for number, each in enumerate(actions):
        time = evaluation.stages[number]
        done = max((span.end_seconds for span, _ in each), default=0.0)
        spans = [span for span, _ in each]
        inside = [_inside(span, one) for span, one in each]
        for name, seconds in (("reduction", time.tail_seconds), ("optimizer", time.optimizer_seconds)):
            if seconds:
                spans.append(StageSpan(name, -1, -1, done, done + seconds))
                inside.append(())
                done += seconds
        stages.append(StageTimeline(tuple(spans), tuple(inside), done))
    flushed = candidate.pipeline.weight_versions == 1
    shared = len(costs) > 1 and cluster.device.ranks_per_core > 1
    return StepTimeline(evaluation, tuple(traces), costs, tuple(stages), flushed, shared)


_Action = tuple[StageSpan, MicroBatchPass | None]


def _passes_in_order(cost: ChunkCost, micro_batches: int) -> Iterator[_Action]:
    """Yield the passes of the only stage, one after the other; what the last backward waits for at its end is not in it."""
    passes, clock = cost.passes, 0.0
    for number in range(micro_batches):
        last = number == micro_batches - 1
        for kind, one in (
            (FORWARD, passes.forward if number else passes.first_forward),
            (BACKWARD, passes.last_backward if last else passes.backward),
        ):
            end = clock + one.seconds - (one.tail_seconds if last and kind == BACKWARD else 0.0)
            yield StageSpan(kind, 0, number, clock, end), one
            clock = end


def _with_passes(spans: Sequence[ActionSpan], costs: Sequence[ChunkCost]) -> list[_Action]:
    """Return a rank's actions, each with its pass."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for place, span in enumerate(spans):
        key = span.action.kind, span.action.chunk
        first.setdefault(key, place)
        last[key] = place
    out: list[_Action] = []
    for place, span in enumerate(spans):
        action = span.action
        passes, key = costs[action.chunk].passes, (action.kind, action.chunk)
        one = None
        if action.kind == FORWARD:
            one = passes.first_forward if first[key] == place else passes.forward
        elif action.kind == BACKWARD:
            one = passes.last_backward if last[key] == place else passes.backward
        stage_span = StageSpan(action.kind, action.chunk, action.micro_batch, span.start_seconds, span.end_seconds)
        out.append((stage_span, one))
    return out


def _inside(span: StageSpan, one: MicroBatchPass | None) -> tuple[StreamSpan, ...]:
    """Return what the streams do inside a span. A first forward may begin with a wait that was over before, a last backward ends
    with one of its own (`reduction`); any other pass is as long as its span, or is not shown."""
    if one is None:
        return ()
    seconds, before = span.end_seconds - span.start_seconds, 0.0
    if span.action == FORWARD:
        before = one.seconds - seconds
        if not -_PRECISION * one.seconds <= before <= one.stall_seconds + _PRECISION * one.seconds:
            return ()
    elif min(abs(one.seconds - seconds), abs(one.seconds - one.tail_seconds - seconds)) > 1e-6 * one.seconds:
        return ()
    shift = span.start_seconds - before
    moved = (
        each._replace(
            start_seconds=max(span.start_seconds, each.start_seconds + shift),
            end_seconds=min(span.end_seconds, each.end_seconds + shift) if each.what != REDUCTION else each.end_seconds + shift,
        )
        for each in one.spans
    )
    return tuple(each for each in moved if each.end_seconds > each.start_seconds)


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The timeline of a pipeline rank: its model chunks, its actions with their times, the end of the last one, the share of the
    makespan in which it is idle, and the most (chunk, micro-batch) pairs that it has in flight at once."""

    chunks: tuple[int, ...]
    spans: tuple[ActionSpan, ...]
    busy_seconds: float
    end_seconds: float
    bubble_share: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class PipelineTimeline:
    """All pipeline ranks of one step: forwards and backwards with their communication, up to the last backward. Neither the
    optimizer nor the tail of gradient reductions on the data axis is included."""

    schedule: str
    makespan_seconds: float
    ranks: tuple[RankTimeline, ...]

    @property
    def bubble_share(self) -> float:
        """The mean over the ranks."""
        return sum(rank.bubble_share for rank in self.ranks) / len(self.ranks)


def pipeline_timeline(graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str) -> PipelineTimeline:
    """Return the timeline with the times of `evaluate`. PlanError where the candidate's schedule is none."""
    traces = stage_traces(graph, candidate, cluster)
    return chunks_timeline(candidate, cluster, chunk_costs(graph, candidate, cluster, traces, optimizer_named(optimizer)))


def chunks_timeline(candidate: Candidate, cluster: Cluster, costs: Sequence[ChunkCost]) -> PipelineTimeline:
    """Return the timeline of model chunks of these costs."""
    schedule = schedule_of(candidate.pipeline, candidate.micro_batches)
    times = schedule_times(costs, cluster)
    alone, shared = ScheduleClock.of(schedule), cluster.device.ranks_per_core
    clock = SharedCores(alone, shared, times.waits) if shared > 1 else alone
    seconds = times.chunks, times.transfer_seconds, times.blocking
    spans, ranks = clock.action_spans(*seconds), clock.run(*seconds)
    end = max(rank.end_seconds for rank in ranks)
    return PipelineTimeline(
        schedule.name,
        end,
        tuple(
            RankTimeline(
                chunks=tuple(sorted({action.chunk for action in actions})),
                spans=spans_here,
                busy_seconds=rank.busy_seconds,
                end_seconds=rank.end_seconds,
                bubble_share=1 - rank.busy_seconds / end if end else 0.0,
                in_flight=most_in_flight(actions),
            )
            for actions, spans_here, rank in zip(schedule.ranks, spans, ranks, strict=True)
        ),
    )
