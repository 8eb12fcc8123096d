"""All prices of one block on one mesh, each looked up once: what the solver's tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models.arcs import ArcCost, arc_cost
from autopar.cost_models.compute import NodeCost, Profile, busiest_rank, node_cost, profile, share_of_copies
from autopar.cost_models.fusion import Fusable, fusable, fused
from autopar.cost_models.groups import expert_links, state_links
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.saved import Saved, saved_tensors
from autopar.cost_models.sizes import shards, value_bytes
from autopar.cost_models.state import Group, Optimizer, StateCost, StatePolicy, group_of, state_cost
from autopar.cost_models.traffic import accumulate_seconds
from autopar.errors import PlanError
from autopar.ir.graph import Block, Node, Parameter, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import NodePlan, Precision


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that lives from forward to backward. `value` ends in ``+`` for what is kept beside operands and results. `bytes`
    on one device. `autopar.cost_models.memory.kept_tensors` tells which of them are one tensor (views, free conversions)."""

    value: str
    placements: Placements
    bytes: float


class BlockCosts:
    """Prices of one block at a global batch. Every method is a few look-ups; results are plain frozen records.

    State is sharded over `zero_group` neighbours on the data axis and equal between such groups (0: over all of it).
    """

    def __init__(self, block: Block, mesh: Mesh, batch: int, cluster: Cluster, zero_group: int = 0) -> None:
        self.block, self.mesh, self.batch, self.cluster = block, mesh, batch, cluster
        self.state_links = state_links(cluster, mesh, zero_group)
        self.values: dict[str, Value] = block.values()
        self._arcs: dict[tuple[str, Placements, Placements], ArcCost] = {}
        self._profiles: dict[str, Profile] = {}
        self._bytes: dict[tuple[str, Placements], float] = {}
        self._kept: dict[int, tuple[NodePlan, tuple[Kept, ...]]] = {}
        self._costs: dict[int, tuple[NodePlan, NodeCost]] = {}

    def like(self, other: BlockCosts) -> None:
        """Takes over what `other`, of the same block on another mesh, knows already, and shares what either finds."""
        self.__dict__["saved"] = other.saved
        if other.batch == self.batch:
            self._profiles = other._profiles

    def regrouped(self, zero_group: int) -> BlockCosts:
        """The same prices, kept in common, with another state group."""
        other = copy(self)
        other.state_links = state_links(self.cluster, self.mesh, zero_group)
        return other

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """By the name of the first output, as `NodePlan.node`."""
        return {node.name: node for node in self.block.nodes}

    @cached_property
    def saved(self) -> dict[str, Saved]:
        """What autograd keeps, per node."""
        return {node.name: saved_tensors(node, self.values, self.cluster.device.kind) for node in self.block.nodes}

    def profile(self, name: str) -> Profile:
        """Global FLOPs and bytes of a node."""
        if name not in self._profiles:
            found = profile(self.nodes[name], self.values, self.batch)
            self._profiles[name] = fused(self.nodes[name], found, self._streaming) if self.cluster.device.fused else found
        return self._profiles[name]

    @cached_property
    def _streaming(self) -> Fusable:
        return fusable(self.block)

    def node(self, plan: NodePlan) -> NodeCost:
        """Seconds and FLOPs of one node under one strategy."""
        found = self._costs.get(id(plan))
        if found is None:
            node, known = self.nodes[plan.node], self.profile(plan.node)
            found = plan, node_cost(node, self.values, plan, self.mesh, self.batch, self.cluster, known)
            self._costs[id(plan)] = found
        return found[1]

    def arc(self, value: str, source: Placements, target: Placements) -> ArcCost:
        """Seconds of one conversion."""
        key = value, source, target
        if key not in self._arcs:
            self._arcs[key] = arc_cost(self.values[value], source, target, self.mesh, self.batch, self.cluster)
        return self._arcs[key]

    def offload_seconds(self, size_bytes: float) -> tuple[float, float]:
        """To the host, and back."""
        host = self.cluster.host
        if not size_bytes:
            return 0.0, 0.0
        if host is None:
            raise PlanError(
                f"{self.cluster.name} says nothing of its host, so nothing can wait there: describe it, or plan again"
            )
        return size_bytes / host.write_bytes_per_second, size_bytes / host.read_bytes_per_second

    def value_bytes(self, value: str, placements: Placements) -> float:
        """Bytes of a value on one device."""
        key = value, placements
        found = self._bytes.get(key)
        if found is None:
            found = self._bytes[key] = value_bytes(self.values[value], self.batch) / shards(placements, self.mesh.sizes)
        return found

    def kept(self, plan: NodePlan) -> tuple[Kept, ...]:
        """What the node keeps for its backward. Parameters are among it: the caller leaves them out, since they live anyway."""
        found = self._kept.get(id(plan))  # the same few plans are asked for again and again, and their hash takes longer
        if found is None:
            found = self._kept[id(plan)] = plan, tuple(self._keeps(plan))
        return found[1]

    def _keeps(self, plan: NodePlan) -> Iterator[Kept]:
        node, saved = self.nodes[plan.node], self.saved[plan.node]
        for name, placements, flag in zip(node.operands(), plan.operands, saved.operands, strict=True):
            if flag:
                yield Kept(name, placements, self.value_bytes(name, placements))
        for output, placements, flag in zip(node.outputs, plan.results, saved.results, strict=True):
            if flag:
                yield Kept(output.name, placements, self.value_bytes(output.name, placements))
        if saved.extra_ratio:
            at = saved.reference
            name, placements = (
                (node.operands()[at], plan.operands[at]) if at >= 0 else (node.outputs[-1 - at].name, plan.results[-1 - at])
            )
            share = saved.extra_ratio * share_of_copies(node, plan, self.profile(plan.node), self.mesh.sizes, self.cluster)
            extra = share * self.value_bytes(name, placements) + self._received_bytes(plan)
            yield Kept(f"{plan.node}+", placements, extra)

    def _received_bytes(self, plan: NodePlan) -> float:
        """Of experts that are dealt out with the tokens cut: the copies that came from other ranks, which their products keep."""
        known = self.profile(plan.node)
        if known.experts is None or not plan.function.endswith("_dispatched") or len(plan.operands) < 5:
            return 0.0
        tokens = self.value_bytes(self.nodes[plan.node].operands()[0], plan.operands[0])
        return known.experts.top_k * tokens * busiest_rank(known, plan, self.mesh.sizes, self.cluster)

    def state(
        self, stored: Iterable[tuple[Parameter, Placements]], zero: int, precision: Precision, optimizer: Optimizer
    ) -> StateCost:
        """The parameters that one call owns, stored so, under a ZeRO stage."""
        common: list[tuple[Parameter, Placements]] = []
        experts: list[tuple[Parameter, Placements]] = []
        for parameter, at in stored:
            (experts if parameter.cut > 1 else common).append((parameter, at))
        cost = self.group_state(group_of(common, self.mesh), zero, precision, optimizer)
        if not experts:
            return cost
        cut, group = experts[0][0].cut, group_of(experts, self.mesh)
        links = expert_links(self.cluster, self.mesh, cut, [at for _, at in experts])
        part = Group(group.elements / cut, group.trainable / cut, group.tensors, group.buffer_bytes, group.largest / cut)
        policy = StatePolicy.of(precision, optimizer, self.cluster.keeping)
        return cost + state_cost(part, zero, links, self.cluster.device, precision, optimizer, policy)

    def accumulate(self, cost: StateCost, zero: int, precision: Precision) -> float:
        """Seconds in which the gradients of a micro-batch are added to those before."""
        return accumulate_seconds(cost, zero, self.state_links[0].size, self.cluster.device, precision)

    def group_state(self, group: Group, zero: int, precision: Precision, optimizer: Optimizer) -> StateCost:
        """As `state`, for counts that are known already (`state_cost` is linear in them but for latency)."""
        data, across = self.state_links
        policy = StatePolicy.of(precision, optimizer, self.cluster.keeping)
        return state_cost(group, zero, data, self.cluster.device, precision, optimizer, policy, across)
