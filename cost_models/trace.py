"""One call of a planned block as a sequence of segments: what the main stream does, in the order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost_models.behind import Piece, exposed
from autopar.cost_models.block import BlockCosts
from autopar.cost_models.compute import Profile, work_shards
from autopar.cost_models.hardware import links_of_axis
from autopar.cost_models.memory import BlockMemory, block_memory
from autopar.cost_models.replay import Replay
from autopar.cost_models.storages import aliases
from autopar.ir.plan import Arc, BlockPlan, NodePlan

Segment = tuple[float, frozenset[str]]
"""Seconds of the main stream, and the physical links that it occupies meanwhile (none: it computes)."""

NO_LINKS: frozenset[str] = frozenset()
HOST_LINK = frozenset(["host"])
DEFERRABLE = ("aten.linear", "ap.linear_kn")
"""Operations whose backward a schedule may split into the gradient of the input and that of the weight."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of a block as segments of the main stream, and what it adds up to. The backward runs again what the plan does not
    keep, all of it before the first gradient; what waits on the host travels behind the call, and is waited for at its end.
    `weight_seconds` of the backward are gradients of weights that a schedule may put off; until then `late_bytes` are held."""

    costs: BlockCosts
    plan: BlockPlan
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    memory: BlockMemory
    axis_seconds: tuple[float, ...]
    model_flops: float
    flops: float
    redundant_flops: tuple[float, ...]
    weight_seconds: float = 0.0
    late_bytes: float = 0.0

    @staticmethod
    def of(costs: BlockCosts, plan: BlockPlan) -> Run:
        same = aliases(costs.block, plan.nodes, plan.arcs)
        replay = Replay.of(costs, plan, same)
        axes = len(costs.mesh.sizes)
        trace = _Trace(costs, frozenset((*replay.nodes, *replay.arcs)), [0.0] * axes, [0.0] * axes)
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
        moved = sum(replay.offloaded.values())
        away, back = costs.offload_seconds(moved)
        return Run(
            costs,
            plan,
            _padded(exposed(trace.forward), away),
            _padded([*exposed(trace.again), *exposed(trace.backward[::-1])], back),
            block_memory(costs, plan, same, replay),
            tuple(trace.axis_seconds),
            trace.model_flops,
            trace.flops,
            tuple(trace.redundant),
            *_deferrable(costs, plan),
        )

    def total(self, backward: bool, exposed: bool) -> float:
        """Seconds of computing, or of communication that the main stream waits for."""
        return sum(seconds for seconds, links in (self.backward if backward else self.forward) if bool(links) == exposed)


def _deferrable(costs: BlockCosts, plan: BlockPlan) -> tuple[float, float]:
    """Of linears whose weight trains: half of their backward is the weight's gradient, which needs their input and the gradient
    of their result (Qi et al., arXiv 2401.10241, section 2)."""
    trained = {parameter.value.name for parameter in costs.block.parameters if parameter.trainable and not parameter.buffer}
    seconds, tensors = 0.0, {}
    for each in plan.nodes:
        node = costs.nodes[each.node]
        names = node.operands()
        if node.op not in DEFERRABLE or len(names) < 2 or names[1] not in trained:
            continue
        seconds += costs.node(each).backward_seconds / 2
        tensors[names[0], each.operands[0]] = costs.value_bytes(names[0], each.operands[0])
        tensors[f"gradient of {node.name}", each.results[0]] = costs.value_bytes(node.name, each.results[0])
    return seconds, sum(tensors.values())


@dataclass(slots=True)
class _Trace:
    """Collects segments in the order of execution; `again` are those of what the backward repeats."""

    costs: BlockCosts
    repeated: frozenset[str | Arc]
    axis_seconds: list[float]
    redundant: list[float]
    forward: list[Piece] = field(default_factory=list)
    again: list[Piece] = field(default_factory=list)
    backward: list[Piece] = field(default_factory=list)
    model_flops: float = 0.0
    flops: float = 0.0

    def compute(self, plan: NodePlan) -> None:
        cost, known = self.costs.node(plan), self.costs.profile(plan.node)
        again = plan.node in self.repeated
        for stream in (self.forward, self.again)[: 1 + again]:
            _append(stream, cost.forward_seconds, NO_LINKS)
            for axis, seconds in enumerate(cost.forward_comm_seconds):
                self._send(stream, axis, seconds, self._inner(known, axis))
        for axis, seconds in enumerate(cost.backward_comm_seconds):
            self._send(self.backward, axis, seconds, self._inner(known, axis))
        _append(self.backward, cost.backward_seconds, NO_LINKS)
        flops = (1 + again) * known.forward_flops + known.backward_flops
        self.flops += flops
        self.model_flops += known.model_flops
        for axis, cut in enumerate(work_shards(plan.operands, plan.results, self.costs.mesh.sizes)):
            if cut == 1 < self.costs.mesh.sizes[axis]:
                self.redundant[axis] += flops

    def convert(self, arcs: Sequence[Arc]) -> None:
        for arc in arcs:
            cost = self.costs.arc(arc.value, arc.source, arc.target)
            for stream in (self.forward, self.again)[: 1 + (arc in self.repeated)]:
                self._send(stream, cost.axis, cost.forward_comm_seconds)
                _append(stream, cost.forward_local_seconds, NO_LINKS)
            _append(self.backward, cost.backward_local_seconds, NO_LINKS)
            self._send(self.backward, cost.axis, cost.backward_comm_seconds)

    def _inner(self, known: Profile, axis: int) -> float:
        """Which share of what a function communicates by itself may hide."""
        if known.experts is not None:
            return 1.0 if self.costs.cluster.overlap.experts_behind else 0.0
        return self._share(axis)

    def _share(self, axis: int) -> float:
        return 1.0 - 1.0 / self.costs.mesh.sizes[axis] if self.costs.cluster.overlap.model_behind else 0.0

    def _send(self, stream: list[Piece], axis: int, seconds: float, share: float | None = None) -> None:
        if seconds:
            self.axis_seconds[axis] += seconds
            links = links_of_axis(self.costs.cluster, self.costs.mesh, axis).names
            _append(stream, seconds, links, self._share(axis) if share is None else share)


def _append(stream: list[Piece], seconds: float, links: frozenset[str], share: float = 0.0) -> None:
    if not seconds:
        return
    if stream and stream[-1][1:] == (links, share):
        stream[-1] = stream[-1][0] + seconds, links, share
    else:
        stream.append((seconds, links, share))


def _padded(stream: Sequence[Segment], host_seconds: float) -> tuple[Segment, ...]:
    """The stream, and a wait for the host link where that takes longer."""
    left = host_seconds - sum(seconds for seconds, _ in stream)
    return (*stream, (left, HOST_LINK)) if left > 0 else tuple(stream)
