"""One call of a planned block as a sequence of segments: what the main stream does, in the order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.compute import work_shards
from autopar.cost_models.hardware import links_of_axis
from autopar.cost_models.memory import BlockMemory, block_memory
from autopar.ir.plan import Arc, BlockPlan, NodePlan

Segment = tuple[float, frozenset[str]]
"""Seconds of the main stream, and the physical links that it occupies meanwhile (none: it computes)."""

NO_LINKS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a block as segments of the main stream, and what it adds up to."""

    costs: BlockCosts
    plan: BlockPlan
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    memory: BlockMemory
    axis_seconds: tuple[float, ...]
    model_flops: float
    flops: float
    redundant_flops: tuple[float, ...]

    @staticmethod
    def of(costs: BlockCosts, plan: BlockPlan) -> Run:
        axes = len(costs.mesh.sizes)
        trace = _Trace(costs, [0.0] * axes, [0.0] * axes, [0.0] * axes, [0.0] * axes)
        arcs: dict[str, list[Arc]] = {}
        for arc in plan.arcs:
            arcs.setdefault(arc.value, []).append(arc)
        block = costs.block
        for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
            trace.convert(arcs.get(value.name, ()))
        plans = {node_plan.node: node_plan for node_plan in plan.nodes}
        for node in block.nodes:
            trace.compute(plans[node.name])
            for output in node.outputs:
                trace.convert(arcs.get(output.name, ()))
        again = trace.again() if plan.recompute else ()
        return Run(
            costs,
            plan,
            tuple(trace.forward),
            (*again, *reversed(trace.backward)),
            block_memory(costs, plan),
            tuple(trace.axis_seconds),
            trace.model_flops,
            trace.flops,
            tuple(trace.redundant),
        )

    def total(self, backward: bool, exposed: bool) -> float:
        """Seconds of computing, or of communication that the main stream waits for."""
        return sum(seconds for seconds, links in (self.backward if backward else self.forward) if bool(links) == exposed)


@dataclass(slots=True)
class _Trace:
    """Collects segments in the order of execution."""

    costs: BlockCosts
    axis_seconds: list[float]
    redundant: list[float]
    forward_axis_seconds: list[float]
    forward_redundant: list[float]
    forward: list[Segment] = field(default_factory=list)
    backward: list[Segment] = field(default_factory=list)
    model_flops: float = 0.0
    flops: float = 0.0
    forward_flops: float = 0.0

    def compute(self, plan: NodePlan) -> None:
        cost, known = self.costs.node(plan), self.costs.profile(plan.node)
        _append(self.forward, cost.forward_seconds, NO_LINKS)
        for axis, seconds in enumerate(cost.forward_comm_seconds):
            self._send(self.forward, axis, seconds)
        for axis, seconds in enumerate(cost.backward_comm_seconds):
            self._send(self.backward, axis, seconds)
        _append(self.backward, cost.backward_seconds, NO_LINKS)
        flops = known.forward_flops + known.backward_flops
        self.flops += flops
        self.forward_flops += known.forward_flops
        self.model_flops += known.model_flops
        for axis, cut in enumerate(work_shards(plan.operands, plan.results, self.costs.mesh.sizes)):
            if cut == 1 < self.costs.mesh.sizes[axis]:
                self.redundant[axis] += flops
                self.forward_redundant[axis] += known.forward_flops

    def again(self) -> tuple[Segment, ...]:
        """The forward once more, counted."""
        for axis, seconds in enumerate(self.forward_axis_seconds):
            self.axis_seconds[axis] += seconds
        self.flops += self.forward_flops
        self.redundant = [sum(pair) for pair in zip(self.redundant, self.forward_redundant, strict=True)]
        return tuple(self.forward)

    def convert(self, arcs: Sequence[Arc]) -> None:
        for arc in arcs:
            cost = self.costs.arc(arc.value, arc.source, arc.target)
            self._send(self.forward, cost.axis, cost.forward_comm_seconds)
            _append(self.forward, cost.forward_local_seconds, NO_LINKS)
            _append(self.backward, cost.backward_local_seconds, NO_LINKS)
            self._send(self.backward, cost.axis, cost.backward_comm_seconds)

    def _send(self, stream: list[Segment], axis: int, seconds: float) -> None:
        if seconds:
            self.axis_seconds[axis] += seconds
            if stream is self.forward:
                self.forward_axis_seconds[axis] += seconds
            _append(stream, seconds, links_of_axis(self.costs.cluster, self.costs.mesh, axis).names)


def _append(stream: list[Segment], seconds: float, links: frozenset[str]) -> None:
    if not seconds:
        return
    if stream and stream[-1][1] == links:
        stream[-1] = stream[-1][0] + seconds, links
    else:
        stream.append((seconds, links))
