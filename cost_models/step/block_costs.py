"""Costs of one block on one mesh, memoized: operations, conversions, saved tensors and parameter state under any strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.cost_models.comm.conversion_costs import ConversionCost, conversion_cost, partition_seconds
from autopar.cost_models.comm.shard_groups import expert_links, stage_link, state_links
from autopar.cost_models.compute.fusion import with_fused_saves
from autopar.cost_models.compute.kernel_accesses import Access, fused_profile, kernel_accesses
from autopar.cost_models.compute.loss_chunks import chunk_count, gradient_bytes
from autopar.cost_models.compute.operations import NodeCost, Profile, expert_imbalance, node_cost, profile, token_copy_share
from autopar.cost_models.compute.overlapped_collectives import WEIGHT_GRADIENT_SHARE
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.state.optimizers import Optimizer
from autopar.cost_models.state.state_cost import StateCommunication, StateCost, state_cost, state_price_bends
from autopar.cost_models.state.state_group import StateGroup, state_group
from autopar.cost_models.state.state_memory import StatePolicy, offload_target, optimizer_target
from autopar.cost_models.tensors.saved_tensors import saved_tensors
from autopar.cost_models.tensors.sizes import shard_count, value_bytes
from autopar.ir.graph import Block, Node, Parameter, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, NodePlan, Precision
from autopar.ir.plan_file.document import SavedTensors
from autopar.operations.attention import with_packed_tokens
from autopar.operations.experts import expert_degrees
from autopar.operations.losses import runs_in_chunks
from autopar.operations.table import operation


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd saves from forward to backward.

    value: its name; it ends in ``+`` for what an operation saves beside operands and results.
    bytes: on one device. `block_memory.saved_storages` tells which of them share storage (views, free conversions).
    """

    value: str
    placements: Placements
    bytes: float


class BlockCosts:
    """Costs of one block for a global batch of `batch` examples (those of one micro-batch). Results are memoized frozen records.

    Parameter state is sharded over `zero_group` neighbours on the data axis and replicated between such groups (0: over all of
    it).
    """

    def __init__(self, block: Block, mesh: Mesh, batch: int, cluster: Cluster, zero_group: int = 0) -> None:
        self.block, self.mesh, self.batch, self.cluster, self.zero_group = block, mesh, batch, cluster, zero_group
        self.state_links = state_links(cluster, mesh, zero_group)
        self.stage_link = stage_link(cluster, mesh)
        self.values: dict[str, Value] = block.values()
        self._conversions: dict[tuple[str, Placements, Placements], ConversionCost] = {}
        self._profiles: dict[str, Profile] = {}
        self._bytes: dict[tuple[str, Placements], float] = {}
        self._saved_tensors: dict[int, tuple[NodePlan, tuple[SavedTensor, ...]]] = {}
        self._costs: dict[int, tuple[NodePlan, NodeCost]] = {}
        self.traces: dict[int, tuple[BlockPlan, Any]] = {}
        """Filled by `evaluate`: the latest `CallTrace`s, by the id of their plan."""
        self.overlaps: Mapping[str, Any] | None = None
        """Filled by `product_overlaps`."""

    def share_with(self, other: BlockCosts) -> None:
        """Share the memoized results that do not depend on the mesh with `other`, of the same block on another mesh."""
        self.__dict__["saved"] = other.saved
        if other.batch == self.batch:
            self._profiles = other._profiles

    def with_zero_group(self, zero_group: int) -> BlockCosts:
        """Return the same costs, with shared results, for another state group."""
        other = copy(self)
        other.traces, other.zero_group = {}, zero_group
        for name in ("eager", "with_delayed_weight_gradients"):
            other.__dict__.pop(name, None)
        other.state_links = state_links(self.cluster, self.mesh, zero_group)
        return other

    @cached_property
    def eager(self) -> BlockCosts:
        """The costs of the block where it is not compiled, on the same devices."""
        cluster = with_compilation(self.cluster, False)
        return self if cluster is self.cluster else BlockCosts(self.block, self.mesh, self.batch, cluster, self.zero_group)

    @cached_property
    def with_delayed_weight_gradients(self) -> BlockCosts:
        """The costs of the block where gradients of weights are computed later: products are outside of its compiled graphs, and
        hide no collective."""
        if not self.cluster.overlap.weight_gradients:
            return self
        out = copy(self)
        overlap = replace(self.cluster.overlap, weight_gradients=False, async_tensor_parallel=False)
        out.traces, out.overlaps, out.cluster = {}, None, replace(self.cluster, overlap=overlap)
        return out

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The nodes by the name of the first output, as `NodePlan.node`."""
        return {node.name: node for node in self.block.nodes}

    @cached_property
    def saved(self) -> dict[str, SavedTensors]:
        """The tensors that autograd saves, per node."""
        tensors = {node.name: saved_tensors(node, self.values, self.cluster.device.kind) for node in self.block.nodes}
        layout, compiled = self.cluster.state_layout, self.cluster.device.fused
        return with_fused_saves(self.block, tensors, layout.fused_saves) if layout.fused_saves or compiled else tensors

    def profile(self, name: str) -> Profile:
        """Return global FLOPs and bytes of a node."""
        if name not in self._profiles:
            plain = profile(self._with_packed_tokens(name), self.values, self.batch)
            self._profiles[name] = fused_profile(self.nodes[name], plain, self._accesses) if self.cluster.device.fused else plain
        return self._profiles[name]

    def _with_packed_tokens(self, name: str) -> Node:
        return with_packed_tokens(self.nodes[name], self.cluster.document_lengths.tokens)

    @cached_property
    def _accesses(self) -> dict[Access, float]:
        return kernel_accesses(self.block, self.batch)

    def node(self, plan: NodePlan) -> NodeCost:
        """Return the seconds and FLOPs of one node under one strategy."""
        cost = self._costs.get(id(plan))
        if cost is None:
            node, profile = self._with_packed_tokens(plan.node), self.profile(plan.node)
            cost = plan, node_cost(node, self.values, plan, self.mesh, self.batch, self.cluster, profile)
            self._costs[id(plan)] = cost
        return cost[1]

    def weight_gradient_seconds(self, plan: NodePlan) -> float:
        """Return the part of a linear's backward that is the gradient of its weight; of a head in chunks of a loss the forward
        makes it."""
        return 0.0 if runs_in_chunks(plan.function) else WEIGHT_GRADIENT_SHARE * self.node(plan).backward_seconds

    def conversion(self, value: str, source: Placements, target: Placements) -> ConversionCost:
        """Return the seconds of one conversion."""
        key = value, source, target
        if key not in self._conversions:
            cost = conversion_cost(self.values[value], source, target, self.mesh, self.batch, self.cluster)
            if cost.forward_kind == "all_gather" and value in self._cast_before_gathers:
                narrow = replace(self.values[value], dtype="float8_e4m3fn")
                cast = conversion_cost(narrow, source, target, self.mesh, self.batch, self.cluster)
                forward = {name: getattr(cast, name) for name in ("forward_comm_seconds", "forward_local_seconds")}
                cost = replace(cost, **forward)
            self._conversions[key] = cost
        return self._conversions[key]

    @cached_property
    def _cast_before_gathers(self) -> frozenset[str]:
        """Values that nothing but products in float8 reads, where the software casts a shard before it is gathered."""
        if not self.cluster.state_layout.float8_gathers:
            return frozenset()
        cast = {node.name for node in self.block.nodes if operation(node.op).linear and operation(node.op).float8}
        products = {name for node in self.block.nodes if node.name in cast for name in node.operands()[:1]}
        others = {name for node in self.block.nodes if node.name not in cast for name in node.operands()}
        return frozenset(products - others - set(self.block.outputs))

    def offload_seconds(self, size_bytes: float) -> tuple[float, float]:
        """Return the seconds to host memory, and back. PlanError where the cluster describes no host."""
        return offload_target(self.cluster, "cpu", "saved tensor").copy_seconds(size_bytes) if size_bytes else (0.0, 0.0)

    def partition_seconds(self, axis: int, size_bytes: float) -> tuple[float, float]:
        """Return, of a tensor that is saved in parts over a mesh axis, the seconds of the copy in the forward and of the gather
        in the backward."""
        return partition_seconds(size_bytes, links_of_axis(self.cluster, self.mesh, axis), self.cluster.device)

    def value_bytes(self, value: str, placements: Placements) -> float:
        """Return the bytes of a value on one device."""
        key = value, placements
        size = self._bytes.get(key)
        if size is None:
            size = self._bytes[key] = value_bytes(self.values[value], self.batch) / shard_count(placements, self.mesh.sizes)
        return size

    def saved_tensors(self, plan: NodePlan) -> tuple[SavedTensor, ...]:
        """Return what the node saves for its backward, parameters included (callers leave those out, since they live anyway)."""
        tensors = self._saved_tensors.get(id(plan))  # by id: hashing a NodePlan costs more than the look-up
        if tensors is None:
            tensors = self._saved_tensors[id(plan)] = plan, tuple(self._find_saved_tensors(plan))
        return tensors[1]

    def chunks(self, plan: NodePlan) -> int:
        """Return the chunks of tokens that the node runs in."""
        return chunk_count(self.nodes[plan.node], self.values, plan, self.mesh.sizes, self.batch)

    def _find_saved_tensors(self, plan: NodePlan) -> Iterator[SavedTensor]:
        node, saved = self.nodes[plan.node], self.saved[plan.node]
        if runs_in_chunks(plan.function):
            gradients = gradient_bytes(node, self.values, plan.operands, self.mesh.sizes, self.batch)
            if gradients:
                yield SavedTensor(f"{plan.node}+", plan.operands[0], gradients)
            return
        for name, placements, flag in zip(node.operands(), plan.operands, saved.operands, strict=True):
            if flag:
                yield SavedTensor(name, placements, self.value_bytes(name, placements))
        for output, placements, flag in zip(node.outputs, plan.results, saved.results, strict=True):
            if flag:
                yield SavedTensor(output.name, placements, self.value_bytes(output.name, placements))
        if saved.extra_ratio:
            at = saved.extra_reference
            name, placements = (
                (node.operands()[at], plan.operands[at]) if at >= 0 else (node.outputs[-1 - at].name, plan.results[-1 - at])
            )
            share = saved.extra_ratio * token_copy_share(node, plan, self.profile(plan.node), self.mesh.sizes, self.cluster)
            extra = share * self.value_bytes(name, placements) + self._received_bytes(plan)
            yield SavedTensor(f"{plan.node}+", placements, extra)

    def _received_bytes(self, plan: NodePlan) -> float:
        """Return the bytes of tokens received from other ranks, which products of experts with dispatched tokens (expert
        parallelism) save."""
        profile = self.profile(plan.node)
        if profile.experts is None or not plan.function.endswith("_dispatched") or len(plan.operands) < 5:
            return 0.0
        tokens = self.value_bytes(self.nodes[plan.node].operands()[0], plan.operands[0])
        return profile.experts.shapes.top_k * tokens * expert_imbalance(profile, plan, self.mesh.sizes, self.cluster)

    @cached_property
    def expert_degrees(self) -> dict[Parameter, int]:
        """Degrees of expert parallelism outside of the mesh, see `operations.experts.expert_degrees`."""
        return expert_degrees(self.block)

    def state_cost(
        self, stored: Iterable[tuple[Parameter, Placements]], zero: int, precision: Precision, optimizer: Optimizer
    ) -> StateCost:
        """Return the cost of the parameters that one call owns, with their stored placements, under ZeRO stage `zero`. Experts
        are a group of their own: they are replicated over fewer ranks."""
        common: list[tuple[Parameter, Placements]] = []
        experts: list[tuple[Parameter, Placements]] = []
        for parameter, at in stored:
            (experts if parameter in self.expert_degrees else common).append((parameter, at))
        cost = self.group_state_cost(state_group(common, self.mesh, precision), zero, precision, optimizer)
        if not experts:
            return cost
        degree, group = self.expert_degrees[experts[0][0]], state_group(experts, self.mesh, precision)
        links = expert_links(self.cluster, self.mesh, degree, [at for _, at in experts])
        local = StateGroup(
            group.elements / degree, group.trainable / degree, group.tensors, group.buffer_bytes, group.largest / degree
        )
        policy = self._state_policy(precision, optimizer)
        return cost + state_cost(local, zero, links, self.cluster.device, precision, optimizer, policy)

    def state_communication(self, cost: StateCost, zero: int, precision: Precision, micro_batches: int) -> StateCommunication:
        """Return the seconds of a group's transfers, accumulation and update in a step."""
        return StateCommunication.of(cost, zero, self.state_links[0].size, self.cluster.device, precision, micro_batches)

    def group_state_cost(self, group: StateGroup, zero: int, precision: Precision, optimizer: Optimizer) -> StateCost:
        """Return the `state_cost` of one group (between `state_price_bends` linear in its counts but for latencies)."""
        data, across = self.state_links
        policy = self._state_policy(precision, optimizer)
        device = self.cluster.device
        return state_cost(group, zero, data, device, precision, optimizer, policy, across, owners=self.stage_link)

    def state_price_bends(self, zero: int, precision: Precision, optimizer: Optimizer) -> tuple[tuple[float, ...], ...]:
        """Return the elements and trainable elements of a group at which measured prices change their slopes."""
        data, across = self.state_links
        return state_price_bends(zero, data, self._state_policy(precision, optimizer), across)

    def _state_policy(self, precision: Precision, optimizer: Optimizer) -> StatePolicy:
        """Return the policy of the cluster's software. PlanError where the cluster lacks what state is offloaded to."""
        return StatePolicy.of(precision, optimizer, self.cluster.state_layout, optimizer_target(self.cluster, precision))
