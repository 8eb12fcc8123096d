"""All prices of one block on one mesh, each looked up once: what the solver's tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models.arcs import ArcCost, arc_cost
from autopar.cost_models.compute import NodeCost, Profile, node_cost, profile
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.cost_models.saved import Saved, saved_tensors
from autopar.cost_models.sizes import shards, value_bytes
from autopar.cost_models.state import Group, Optimizer, StateCost, group_of, state_cost
from autopar.ir.graph import Block, Node, Parameter, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
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
    """Prices of one block at a global batch. Every method is a few look-ups; results are plain frozen records."""

    def __init__(self, block: Block, mesh: Mesh, batch: int, cluster: Cluster) -> None:
        self.block, self.mesh, self.batch, self.cluster = block, mesh, batch, cluster
        self.values: dict[str, Value] = block.values()
        self._arcs: dict[tuple[str, Placements, Placements], ArcCost] = {}
        self._profiles: dict[str, Profile] = {}

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """By the name of the first output, as `NodePlan.node`."""
        return {node.name: node for node in self.block.nodes}

    @cached_property
    def saved(self) -> dict[str, Saved]:
        """What autograd keeps, per node."""
        return {node.name: saved_tensors(node, self.values) for node in self.block.nodes}

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(parameter.value.name for parameter in self.block.parameters)

    def profile(self, name: str) -> Profile:
        """Global FLOPs and bytes of a node."""
        if name not in self._profiles:
            self._profiles[name] = profile(self.nodes[name], self.values, self.batch)
        return self._profiles[name]

    def node(self, plan: NodePlan) -> NodeCost:
        """Seconds and FLOPs of one node under one strategy."""
        return node_cost(self.nodes[plan.node], self.values, plan, self.mesh, self.batch, self.cluster, self.profile(plan.node))

    def arc(self, value: str, source: Placements, target: Placements) -> ArcCost:
        """Seconds of one conversion."""
        key = value, source, target
        if key not in self._arcs:
            self._arcs[key] = arc_cost(self.values[value], source, target, self.mesh, self.batch, self.cluster)
        return self._arcs[key]

    def value_bytes(self, value: str, placements: Placements) -> float:
        """Bytes of a value on one device."""
        return value_bytes(self.values[value], self.batch) / shards(placements, self.mesh.sizes)

    def kept(self, plan: NodePlan) -> Iterator[Kept]:
        """What the node keeps for its backward. Parameters are among it: the caller leaves them out, since they live anyway."""
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
            yield Kept(f"{plan.node}+", placements, saved.extra_ratio * self.value_bytes(name, placements))

    def is_parameter(self, value: str) -> bool:
        return value in self._parameters

    def state(
        self, stored: Iterable[tuple[Parameter, Placements]], zero: int, precision: Precision, optimizer: Optimizer
    ) -> StateCost:
        """The parameters that one call owns, stored so, under a ZeRO stage."""
        return self.group_state(group_of(stored, self.mesh), zero, precision, optimizer)

    def group_state(self, group: Group, zero: int, precision: Precision, optimizer: Optimizer) -> StateCost:
        """As `state`, for counts that are known already (`state_cost` is linear in them but for latency)."""
        data = links_of_axis(self.cluster, self.mesh, self.mesh.index(DATA_AXIS))
        return state_cost(group, zero, data, self.cluster.device, precision, optimizer)
