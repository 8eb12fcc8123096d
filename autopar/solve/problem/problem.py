"""The tables of one planning problem: on one mesh, the strategies of every operation, the conversions of every value, the
placements of every boundary class, and what each of them costs.

No solver and no variables here: `ilp.formulate` reads these tables and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.compute.operations import work_shards
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import shares_data_links
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.tensors.sizes import user_held_bytes
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import NodePlan, Precision
from autopar.operations.losses import runs_in_chunks
from autopar.rules.registry import Registry
from autopar.solve.problem.boundary import BlockBoundaries
from autopar.solve.problem.conversion_graph import ConversionGraph
from autopar.solve.problem.data_axis import AxisStrategies
from autopar.solve.problem.structure import BlockStructure, LazyTable, Structure, structure_of


@dataclass(frozen=True, slots=True)
class StreamSeconds:
    """Seconds of the main stream, computation and exposed communication. `_shared`: the part that occupies a physical link which
    the data axis uses too, so that the communication of state cannot run meanwhile."""

    forward: float
    backward: float
    forward_shared: float = 0.0
    backward_shared: float = 0.0

    @property
    def recompute(self) -> StreamSeconds:
        """The seconds of its recomputation: those of the forward, in the backward."""
        return StreamSeconds(0.0, self.forward, 0.0, self.forward_shared)


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """A strategy of a node. `redundant_flops` per mesh axis: FLOPs that every rank of the axis repeats."""

    plan: NodePlan
    seconds: StreamSeconds
    redundant_flops: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ConversionEdge:
    """A conversion between two `PricedConversions.states`. `alias`: the storage is the same, and the forward does nothing."""

    source: int
    target: int
    seconds: StreamSeconds
    alias: bool


@dataclass(frozen=True, slots=True)
class PricedConversions:
    """The conversion graph of a value, with seconds."""

    states: tuple[Placements, ...]
    edges: tuple[ConversionEdge, ...]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The tables of one distinct block. `strategies` per node, `conversions` per value, priced when they are first read: what
    only asks for the state of parameters prices none. `consumers` per value: (node, operand), ("", output) or ("=", 0) for a
    buffer's new value."""

    block: Block
    costs: BlockCosts
    strategies: Mapping[str, tuple[NodeStrategy, ...]]
    consumers: Mapping[str, tuple[tuple[str, int], ...]]
    conversions: Mapping[str, PricedConversions]

    @property
    def flops(self) -> float:
        """Forward and backward, unsharded."""
        profiles = (self.costs.profile(node.name) for node in self.block.nodes)
        return sum(profile.forward_flops + profile.backward_flops for profile in profiles)

    @property
    def least_seconds(self) -> float:
        """One call of one micro-batch, forward and backward, with the fastest strategy of every operation."""
        every = self.strategies.values()
        return sum(min(each.seconds.forward + each.seconds.backward for each in strategies) for strategies in every)


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything about one mesh. `placements`: the allowed ones per boundary class. `zeros`: the allowed state shardings (ZeRO
    stages), over `zero_group` neighbours on the data axis (0: all). `graph` has the examples of one of the `micro_batches`
    of a step."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    precision: Precision
    optimizer: str
    boundary: BlockBoundaries
    blocks: Mapping[str, BlockTable]
    placements: Mapping[int, tuple[Placements, ...]]
    zeros: tuple[int, ...]
    micro_batches: int = 1
    zero_group: int = 0

    @property
    def batch_costs(self) -> dict[str, BlockCosts]:
        """The price tables for `evaluate`."""
        return {name: table.costs for name, table in self.blocks.items()}

    @property
    def batch_bytes(self) -> float:
        """The batch of a step, as the user passes it."""
        return user_held_bytes(self.graph, self.graph.batch * self.micro_batches, self.mesh)


def build_problem(
    graph: Graph, mesh: Mesh, cluster: Cluster, precision: Precision, optimizer: str, registry: Registry,
    zeros: Collection[int] = (0, 1, 2, 3), *, micro_batches: int = 1,
) -> Problem:  # fmt: skip
    """All tables for `graph`, whose batch is that of a micro-batch, on `mesh`."""
    structure = structure_of(graph, mesh, AxisStrategies(graph, registry))
    return price_structure(structure, graph, cluster, precision, optimizer, zeros=zeros, micro_batches=micro_batches)


def with_zero_group(problem: Problem, zero_group: int) -> Problem:
    """The same tables with state sharded over so many neighbours on the data axis (0: all)."""
    if zero_group == problem.zero_group:
        return problem
    tables = {name: replace(table, costs=table.costs.with_zero_group(zero_group)) for name, table in problem.blocks.items()}
    return replace(problem, blocks=tables, zero_group=zero_group)


def price_structure(
    structure: Structure, graph: Graph, cluster: Cluster, precision: Precision, optimizer: str, *,
    zeros: Collection[int] = (0, 1, 2, 3), micro_batches: int = 1, known_costs: dict[str, BlockCosts] | None = None,
) -> Problem:  # fmt: skip
    """The tables of a structure for `graph` at its batch, that of a micro-batch. `known_costs` collects costs per block that
    all meshes share."""
    mesh = structure.mesh
    pricing = _Pricing(structure, graph, cluster, {} if known_costs is None else known_costs)
    allowed = tuple(sorted(zeros)) if mesh.size_of(DATA_AXIS) > 1 else (0,)
    tables = {name: pricing.table(block) for name, block in structure.blocks.items()}
    return Problem(
        graph=graph,
        mesh=mesh,
        cluster=cluster,
        precision=precision,
        optimizer=optimizer,
        boundary=structure.boundary,
        blocks=tables,
        placements=structure.placements,
        zeros=allowed,
        micro_batches=micro_batches,
    )


class _Pricing:
    """Prices of one structure. `shares_link`: per mesh axis, whether it uses a physical link of the data axis."""

    def __init__(self, structure: Structure, graph: Graph, cluster: Cluster, known_costs: dict[str, BlockCosts]) -> None:
        self.mesh, self.cluster, self.batch, self.known = structure.mesh, cluster, graph.batch, known_costs
        self.shares_link = [shares_data_links(cluster, self.mesh, axis) for axis in range(len(self.mesh.sizes))]
        self._conversions: dict[int, PricedConversions] = {}
        self._prices: dict[object, tuple[StreamSeconds, bool]] = {}

    def table(self, of: BlockStructure) -> BlockTable:
        costs = BlockCosts(of.block, self.mesh, self.batch, self.cluster)
        costs.share_with(self.known.setdefault(of.block.name, costs))
        strategies = LazyTable(of.plans, lambda name: self._strategies(costs, of.plans[name], of.same_price_as[name]))
        conversions = LazyTable(of.conversions, lambda name: self._priced_conversions(costs, name, of.conversions[name]))
        return BlockTable(block=of.block, costs=costs, strategies=strategies, consumers=of.consumers, conversions=conversions)

    def _strategies(
        self, costs: BlockCosts, plans: tuple[NodePlan, ...], same_price_as: tuple[int, ...]
    ) -> tuple[NodeStrategy, ...]:
        out: dict[int, NodeStrategy] = {}
        for index, plan in enumerate(plans):
            first = same_price_as[index]
            if runs_in_chunks(plan.function) and costs.chunks(plan) == 1:
                continue  # the whole loss
            if first < index:
                out[index] = NodeStrategy(plan, out[first].seconds, out[first].redundant_flops)
            else:
                out[index] = self._strategy(costs, plan)
        return tuple(out.values())

    def _strategy(self, costs: BlockCosts, plan: NodePlan) -> NodeStrategy:
        cost, profile = costs.node(plan), costs.profile(plan.node)
        seconds = StreamSeconds(
            cost.forward_seconds + sum(cost.forward_comm_seconds),
            cost.backward_seconds + sum(cost.backward_comm_seconds),
            sum(each for axis, each in enumerate(cost.forward_comm_seconds) if self.shares_link[axis]),
            sum(each for axis, each in enumerate(cost.backward_comm_seconds) if self.shares_link[axis]),
        )
        flops = profile.forward_flops + profile.backward_flops
        sizes = self.mesh.sizes
        cuts = work_shards(plan.operands, plan.results, sizes) if flops else (0,) * len(sizes)
        repeated = tuple(flops if cut == 1 < size else 0.0 for cut, size in zip(cuts, sizes, strict=True))
        return NodeStrategy(plan, seconds, repeated)

    def _priced_conversions(self, costs: BlockCosts, value: str, graph: ConversionGraph) -> PricedConversions:
        """Values with the same graph have one shape and dtype."""
        key = id(graph)
        if key not in self._conversions:
            source_value = costs.values[value]
            kind = source_value.shape, source_value.dtype, source_value.differentiable
            prices = [self._price(costs, value, kind, graph, number) for number in range(len(graph.price_keys))]
            edges = tuple(ConversionEdge(source, target, *prices[price]) for source, target, price in graph.edges)
            self._conversions[key] = PricedConversions(graph.states, edges)
        return self._conversions[key]

    def _price(
        self, costs: BlockCosts, value: str, kind: object, graph: ConversionGraph, number: int
    ) -> tuple[StreamSeconds, bool]:
        """Seconds of an edge, and whether nothing happens in the forward. Equal for all values of one `kind`."""
        change = graph.price_keys[number]
        key = kind, change
        if key not in self._prices:
            source, target, _ = graph.edges[graph.examples[number]]
            cost = costs.conversion(value, graph.states[source], graph.states[target])
            shared = self.shares_link[cost.axis]
            seconds = StreamSeconds(
                cost.forward_seconds,
                cost.backward_seconds,
                cost.forward_comm_seconds if shared else 0.0,
                cost.backward_comm_seconds if shared else 0.0,
            )
            self._prices[key] = seconds, cost.forward_kind is None
        return self._prices[key]
