"""The clock of one training step: calls on the main stream, transfers of the data axis behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.cost_models.state import StateCost
from autopar.cost_models.streams import Streams
from autopar.cost_models.trace import Run
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate


@dataclass(slots=True)
class Steps:
    """The clock's readings: per call (start, seconds, waited), and the sums."""

    forward: list[tuple[float, float, float]]
    backward: list[tuple[float, float, float]]
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    waited_seconds: float


def simulate(
    graph: Graph, candidate: Candidate, cluster: Cluster, runs: Mapping[str, Run], states: Sequence[StateCost], root: StateCost
) -> Steps:
    """Weights of the next call are gathered behind each call, forward and (ZeRO-3) again backward; gradients of a call are
    reduced behind the next call of the backward and waited for at its end. The first gather and the last reduction stand
    alone. The last call keeps its weights from forward to backward: it would gather them at once again."""
    mesh = candidate.mesh
    streams = Streams(links_of_axis(cluster, mesh, mesh.index(DATA_AXIS)).names)
    last = len(graph.calls) - 1
    streams.wait(streams.issue(root.gather_forward_seconds))
    forward, backward = [], []
    gather = streams.issue(states[0].gather_forward_seconds)
    for index, call in enumerate(graph.calls):
        start, waited = streams.clock, streams.waited
        streams.wait(gather)
        if index < last:
            gather = streams.issue(states[index + 1].gather_forward_seconds)
        for seconds, links in runs[call.block].forward:
            streams.run(seconds, links)
        forward.append((start, streams.clock - start, streams.waited - waited))
    half = streams.clock
    reduction = 0
    for index in range(last, -1, -1):
        start, waited = streams.clock, streams.waited
        streams.wait(gather)
        if index:
            gather = streams.issue(states[index - 1].gather_backward_seconds)
        for seconds, links in runs[graph.calls[index].block].backward:
            streams.run(seconds, links)
        streams.wait(reduction)
        reduction = streams.issue(states[index].reduce_seconds)
        backward.append((start, streams.clock - start, streams.waited - waited))
    streams.wait(streams.issue(root.reduce_seconds))
    end = streams.clock
    optimizer = root.optimizer_seconds + sum(state.optimizer_seconds for state in states)
    return Steps(forward, backward[::-1], half, end - half, optimizer, streams.waited)
