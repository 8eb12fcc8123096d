"""Named tables of one planning problem: what every operation, value and boundary may be on a mesh, and what that costs.

No solver and no variables here: `formulate` reads these tables and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.compute import work_shards
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.ir.graph import Block, Graph
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import NodePlan, Precision
from autopar.rules.registry import Registry
from autopar.solve.boundary import Boundary
from autopar.solve.lazy import Lazy
from autopar.solve.routes import Routes
from autopar.solve.structure import BlockStructure, Pins, Structure, structure_of


@dataclass(frozen=True, slots=True)
class Seconds:
    """What the main stream spends, and which part of it occupies a physical link that the data axis uses."""

    forward: float
    backward: float
    forward_shared: float = 0.0
    backward_shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy of a node. `redundant_flops` per axis: what every rank of the axis repeats."""

    plan: NodePlan
    seconds: Seconds
    redundant_flops: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A conversion between two states (by index) of a `Moves`. `alias`: nothing happens forward, the storage is the same."""

    source: int
    target: int
    seconds: Seconds
    alias: bool


@dataclass(frozen=True, slots=True)
class Moves:
    """The placement graph of a value."""

    states: tuple[Placements, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One distinct block. `consumers` per value: (node, operand), ("", output) or ("=", 0) for a buffer's new value."""

    block: Block
    costs: BlockCosts
    choices: Mapping[str, tuple[Choice, ...]]
    consumers: Mapping[str, tuple[tuple[str, int], ...]]
    moves: Mapping[str, Moves]
    flops: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything about one mesh. `placements` are what a boundary class may be; `zeros` the allowed state shardings; `batch` is
    that of one of the `micro_batches` of a step."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    precision: Precision
    optimizer: str
    batch: int
    boundary: Boundary
    blocks: Mapping[str, BlockTable]
    placements: Mapping[int, tuple[Placements, ...]]
    zeros: tuple[int, ...]
    micro_batches: int = 1
    zero_group: int = 0

    @property
    def batch_costs(self) -> dict[str, BlockCosts]:
        """The price tables for `evaluate`."""
        return {name: table.costs for name, table in self.blocks.items()}


def build(
    graph: Graph, mesh: Mesh, cluster: Cluster, precision: Precision, optimizer: str, registry: Registry,
    zeros: Collection[int] = (0, 1, 2, 3), pins: Pins | None = None, micro_batches: int = 1,
) -> Problem:  # fmt: skip
    """All tables for `graph`, whose batch is that of a micro-batch, on `mesh`."""
    structure = structure_of(graph, mesh, registry, pins)
    return priced(structure, graph, cluster, precision, optimizer, zeros, micro_batches)


def regrouped(problem: Problem, zero_group: int) -> Problem:
    """The same tables with state sharded over so many neighbours on the data axis (0: all)."""
    if zero_group == problem.zero_group:
        return problem
    tables = {name: replace(table, costs=table.costs.regrouped(zero_group)) for name, table in problem.blocks.items()}
    return replace(problem, blocks=tables, zero_group=zero_group)


def priced(
    structure: Structure, graph: Graph, cluster: Cluster, precision: Precision, optimizer: str,
    zeros: Collection[int] = (0, 1, 2, 3), micro_batches: int = 1, known: dict[str, BlockCosts] | None = None,
) -> Problem:  # fmt: skip
    """The tables of a structure for `graph` at its batch, that of a micro-batch. `known` collects, per block, what other meshes
    have in common with this one."""
    mesh = structure.mesh
    pricing = _Pricing(structure, graph, cluster, {} if known is None else known)
    allowed = tuple(sorted(zeros)) if mesh.size_of(DATA_AXIS) > 1 else (0,)
    tables = {name: pricing.table(block) for name, block in structure.blocks.items()}
    return Problem(
        graph, mesh, cluster, precision, optimizer, graph.batch, structure.boundary, tables, structure.placements, allowed,
        micro_batches=micro_batches,
    )  # fmt: skip


class _Pricing:
    def __init__(self, structure: Structure, graph: Graph, cluster: Cluster, known: dict[str, BlockCosts]) -> None:
        self.mesh, self.cluster, self.batch, self.known = structure.mesh, cluster, graph.batch, known
        sizes, data = self.mesh.sizes, self.mesh.index(DATA_AXIS)
        shared = links_of_axis(cluster, self.mesh, data).names
        self.shares = [not shared.isdisjoint(links_of_axis(cluster, self.mesh, axis).names) for axis in range(len(sizes))]
        self._moves: dict[int, Moves] = {}
        self._prices: dict[object, tuple[Seconds, bool]] = {}

    def table(self, of: BlockStructure) -> BlockTable:
        costs = BlockCosts(of.block, self.mesh, self.batch, self.cluster)
        costs.like(self.known.setdefault(of.block.name, costs))
        choices = {name: self._choices(costs, plans, of.alike[name]) for name, plans in of.plans.items()}
        moves = Lazy(of.routes, lambda name: self._priced_moves(costs, name, of.routes[name]))
        profiles = [costs.profile(node.name) for node in of.block.nodes]
        flops = sum(known.forward_flops + known.backward_flops for known in profiles)
        return BlockTable(of.block, costs, choices, of.consumers, moves, flops)

    def _choices(self, costs: BlockCosts, plans: tuple[NodePlan, ...], alike: tuple[int, ...]) -> tuple[Choice, ...]:
        out: list[Choice] = []
        for index, plan in enumerate(plans):
            first = alike[index]
            if first < index:
                out.append(Choice(plan, out[first].seconds, out[first].redundant_flops))
            else:
                out.append(self._choice(costs, plan))
        return tuple(out)

    def _choice(self, costs: BlockCosts, plan: NodePlan) -> Choice:
        cost, known = costs.node(plan), costs.profile(plan.node)
        seconds = Seconds(
            cost.forward_seconds + sum(cost.forward_comm_seconds),
            cost.backward_seconds + sum(cost.backward_comm_seconds),
            sum(each for axis, each in enumerate(cost.forward_comm_seconds) if self.shares[axis]),
            sum(each for axis, each in enumerate(cost.backward_comm_seconds) if self.shares[axis]),
        )
        flops = known.forward_flops + known.backward_flops
        sizes = self.mesh.sizes
        cuts = work_shards(plan.operands, plan.results, sizes) if flops else (0,) * len(sizes)
        repeated = tuple(flops if cut == 1 < size else 0.0 for cut, size in zip(cuts, sizes, strict=True))
        return Choice(plan, seconds, repeated)

    def _priced_moves(self, costs: BlockCosts, value: str, routes: Routes) -> Moves:
        """Values with the same routes are of one shape and dtype."""
        key = id(routes)
        if key not in self._moves:
            given = costs.values[value]
            kind = given.shape, given.dtype, given.differentiable
            prices = [self._price(costs, value, kind, routes, number) for number in range(len(routes.prices))]
            steps = tuple(Step(source, target, *prices[price]) for source, target, price in routes.steps)
            self._moves[key] = Moves(routes.states, steps)
        return self._moves[key]

    def _price(self, costs: BlockCosts, value: str, kind: object, routes: Routes, number: int) -> tuple[Seconds, bool]:
        """Seconds of a step, and whether nothing happens forward. Equal for all values of one kind."""
        change = routes.prices[number]
        key = kind, change
        if key not in self._prices:
            source, target, _ = routes.steps[routes.examples[number]]
            cost = costs.arc(value, routes.states[source], routes.states[target])
            shared = self.shares[cost.axis]
            seconds = Seconds(
                cost.forward_seconds,
                cost.backward_seconds,
                cost.forward_comm_seconds if shared else 0.0,
                cost.backward_comm_seconds if shared else 0.0,
            )
            self._prices[key] = seconds, cost.forward_kind is None
        return self._prices[key]
