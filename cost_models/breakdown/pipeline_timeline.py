"""The predicted timeline of a pipeline: when each pipeline rank runs each action of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.chunk_costs import ChunkCost, chunk_costs
from autopar.cost_models.step.evaluate import stage_traces
from autopar.cost_models.step.stage_times import schedule_times
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.schedules.clock import ActionSpan, ScheduleClock
from autopar.schedules.in_flight import most_in_flight
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.shared_cores import SharedCores


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
