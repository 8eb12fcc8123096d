"""Named tables of one planning problem: what every operation, value and boundary may be on a mesh, and what that costs.

No solver and no variables here: `formulate` reads these tables and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from autopar.cost_models.arcs import ArcCost
from autopar.cost_models.block import BlockCosts
from autopar.cost_models.compute import work_shards
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard, parse_placements
from autopar.ir.plan import NodePlan, Precision
from autopar.rules.conversions import arcs, states
from autopar.rules.expand import block_strategies, combine
from autopar.rules.registry import Registry
from autopar.solve.boundary import Boundary, Slot
from autopar.solve.data_axis import propagate


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
    """Everything about one mesh. `placements` are what a boundary class may be; `zeros` the allowed state shardings; `recompute`
    names the blocks that keep only their inputs and run their forward once more in the backward."""

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
    recompute: frozenset[str] = frozenset()

    @property
    def batch_costs(self) -> dict[str, BlockCosts]:
        """The price tables for `evaluate`."""
        return {name: table.costs for name, table in self.blocks.items()}


Pins = Mapping[str, str]
"""Value name -> placements on the model axes, as text (``I``, ``S(1) R``): produced so, and passed so between blocks."""


def build(
    graph: Graph, mesh: Mesh, cluster: Cluster, precision: Precision, optimizer: str, registry: Registry,
    zeros: Collection[int] = (0, 1, 2, 3), pins: Pins | None = None,
) -> Problem:  # fmt: skip
    """All tables for `graph` on `mesh`."""
    builder = _Builder(graph, mesh, cluster, registry, pins or {})
    data = mesh.size_of(DATA_AXIS)
    allowed = tuple(sorted(zeros)) if data > 1 else (0,)
    return Problem(
        graph, mesh, cluster, precision, optimizer, graph.batch, builder.boundary, builder.tables(), builder.placements, allowed
    )


class _Builder:
    def __init__(self, graph: Graph, mesh: Mesh, cluster: Cluster, registry: Registry, pins: Pins) -> None:
        self.graph, self.mesh, self.cluster, self.registry = graph, mesh, cluster, registry
        self.boundary = Boundary(graph)
        self.data = mesh.index(DATA_AXIS)
        self.pins = {name: parse_placements(text) for name, text in pins.items()}
        self.propagated = propagate(graph, self.boundary, mesh.sizes[self.data], registry)
        shared = links_of_axis(cluster, mesh, self.data).names
        self.shares = [not shared.isdisjoint(links_of_axis(cluster, mesh, axis).names) for axis in range(len(mesh.sizes))]
        self._moves: dict[object, Moves] = {}
        self._step_costs: dict[object, tuple[Seconds, bool]] = {}
        self.costs = {name: BlockCosts(block, mesh, graph.batch, cluster) for name, block in self.boundary.blocks.items()}
        self.choices = {name: self._choices(block) for name, block in self.boundary.blocks.items()}
        self.ends = {name: self._ends(block) for name, block in self.boundary.blocks.items()}
        self.placements = {number: self._class(number) for number in self.boundary.members}

    def tables(self) -> dict[str, BlockTable]:
        return {name: self._table(block) for name, block in self.boundary.blocks.items()}

    def _choices(self, block: Block) -> dict[str, tuple[Choice, ...]]:
        by_size: dict[int, dict[str, tuple[Placement, ...]]] = {}
        for axis, size in enumerate(self.mesh.sizes):
            if axis != self.data and size not in by_size:
                by_size[size] = block_strategies(  # type: ignore[assignment]
                    block, size, batch_axis=False, batch_is_symbolic=self.graph.batch_is_symbolic, registry=self.registry
                )
        values = block.values()
        out = {}
        for node in block.nodes:
            per_axis = [
                (self.propagated.strategies[block.name, node.name],) if axis == self.data else by_size[size][node.name]
                for axis, size in enumerate(self.mesh.sizes)
            ]
            plans = [plan for plan in combine(per_axis, node, values, self.mesh.sizes) if self._pinned(node, plan)]  # type: ignore[arg-type]
            out[node.name] = tuple(self._choice(block, plan) for plan in plans)
        return out

    def _model(self, placements: Placements) -> Placements:
        return tuple(place for axis, place in enumerate(placements) if axis != self.data)

    def _pinned(self, node: Node, plan: NodePlan) -> bool:
        return all(
            self._model(at) == self.pins.get(value.name, self._model(at))
            for value, at in zip(node.outputs, plan.results, strict=True)
        )

    def _choice(self, block: Block, plan: NodePlan) -> Choice:
        costs = self.costs[block.name]
        cost, known = costs.node(plan), costs.profile(plan.node)
        seconds = Seconds(
            cost.forward_seconds + sum(cost.forward_comm_seconds),
            cost.backward_seconds + sum(cost.backward_comm_seconds),
            sum(each for axis, each in enumerate(cost.forward_comm_seconds) if self.shares[axis]),
            sum(each for axis, each in enumerate(cost.backward_comm_seconds) if self.shares[axis]),
        )
        flops = known.forward_flops + known.backward_flops
        cuts = work_shards(plan.operands, plan.results, self.mesh.sizes) if flops else (0,) * len(self.mesh.sizes)
        repeated = tuple(flops if cut == 1 < size else 0.0 for cut, size in zip(cuts, self.mesh.sizes, strict=True))
        return Choice(plan, seconds, repeated)

    def _ends(self, block: Block) -> dict[str, tuple[dict[Placements, None], dict[Placements, None]]]:
        """Per value: where it is produced and where it is needed, over all strategies."""
        out: dict[str, tuple[dict[Placements, None], dict[Placements, None]]] = {name: ({}, {}) for name in block.values()}
        for node in block.nodes:
            for choice in self.choices[block.name][node.name]:
                for value, at in zip(node.outputs, choice.plan.results, strict=True):
                    out[value.name][0][at] = None
                for name, at in zip(node.operands(), choice.plan.operands, strict=True):
                    out[name][1][at] = None
        for _, name in block.updates:
            out[name][1][(Replicate(),) * len(self.mesh.sizes)] = None
        return out

    def _class(self, number: int) -> tuple[Placements, ...]:
        """What a boundary class may be: whatever its members use, but never Partial on a model axis."""
        slots = self.boundary.members[number]
        values = [self.boundary.value(slot) for slot in slots]
        flows = all(value.differentiable for value in values)
        data = self.propagated.classes[number]
        whole: Placement = Invariant() if flows else Replicate()
        if number == self.boundary.class_of(self.graph.loss):
            return ((whole,) * len(self.mesh.sizes),)
        if number in {self.boundary.class_of(value.name) for value in self.graph.inputs}:
            return (tuple(data if axis == self.data else Replicate() for axis in range(len(self.mesh.sizes))),)
        parameter = slots[0].side == "param"
        buffer = parameter and self.boundary.parameter(slots[0]).buffer
        per_axis: list[dict[Placement, None]] = []
        for axis in range(len(self.mesh.sizes)):
            used = {} if buffer else {
                at[axis]: None
                for slot, value in zip(slots, values, strict=True)
                for side in self.ends[slot.block][value.name]
                for at in side
            }  # fmt: skip
            wanted: list[Placement] = [place for place in used if isinstance(place, Shard)]
            if not parameter and flows:
                wanted.append(Replicate())
            per_axis.append(dict.fromkeys([data] if axis == self.data else [Replicate() if buffer else whole, *wanted]))
        allowed = tuple(at for at in product(*per_axis) if can_shard(values[0].shape, at, self.mesh.sizes))
        for pin in (self.pins[value.name] for value in values if value.name in self.pins):
            allowed = tuple(at for at in allowed if self._model(at) == pin)
        return allowed

    def _table(self, block: Block) -> BlockTable:
        values, choices = block.values(), self.choices[block.name]
        consumers: dict[str, list[tuple[str, int]]] = {}
        for node in block.nodes:
            for index, name in enumerate(node.operands()):
                same = {
                    choice.plan.operands[index] == choice.plan.operands[node.operands().index(name)]
                    for choice in choices[node.name]
                }
                if node.operands().index(name) == index or same != {True}:
                    consumers.setdefault(name, []).append((node.name, index))
        for index, name in enumerate(block.outputs):
            consumers.setdefault(name, []).append(("", index))
        for _, name in block.updates:
            consumers.setdefault(name, []).append(("=", 0))
        at: dict[str, list[Slot]] = {}
        for side, names in (
            ("in", [value.name for value in block.inputs]),
            ("param", [parameter.value.name for parameter in block.parameters]),
            ("out", block.outputs),
        ):
            for index, name in enumerate(names):
                at.setdefault(name, []).append(Slot(block.name, side, index))  # type: ignore[arg-type]
        moves = {}
        for name in consumers:
            produced, needed = (list(side) for side in self.ends[block.name][name])
            for slot in at.get(name, ()):
                (needed if slot.side == "out" else produced).extend(self.placements[self.boundary.classes[slot]])
            moves[name] = self._moves_of(block, values[name], produced, needed)
        profiles = [self.costs[block.name].profile(node.name) for node in block.nodes]
        flops = sum(known.forward_flops + known.backward_flops for known in profiles)
        return BlockTable(
            block, self.costs[block.name], choices, {name: tuple(each) for name, each in consumers.items()}, moves, flops
        )

    def _moves_of(self, block: Block, value: Value, produced: Iterable[Placements], needed: Iterable[Placements]) -> Moves:
        key = (value.shape, value.dtype, value.differentiable, frozenset(produced), frozenset(needed))
        if key not in self._moves:
            self._moves[key] = self._make_moves(block, value, dict.fromkeys(produced), dict.fromkeys(needed))
        return self._moves[key]

    def _make_moves(self, block: Block, value: Value, produced: Collection[Placements], needed: Collection[Placements]) -> Moves:
        """States on the way from any production to any need. Nothing is brought to a Partial or a Shard that nobody needs."""
        axes = range(len(self.mesh.sizes))
        wanted = [{at[axis] for at in needed} for axis in axes]
        among = states(value.shape, (*produced, *needed), self.mesh.sizes, value.differentiable)
        number = {state: index for index, state in enumerate(among)}
        steps = []
        for source, target in arcs(value.shape, among, self.mesh.sizes, value.differentiable):
            axis = next(axis for axis in axes if source[axis] != target[axis])
            if target[axis] not in wanted[axis] and isinstance(target[axis], Shard | Partial):
                continue
            seconds, alias = self._step_cost(block, value, source, target)
            steps.append(Step(number[source], number[target], seconds, alias))
        return _reachable(Moves(among, tuple(steps)), produced, needed)

    def _step_cost(self, block: Block, value: Value, source: Placements, target: Placements) -> tuple[Seconds, bool]:
        key = (value.shape, value.dtype, value.differentiable, source, target)
        if key not in self._step_costs:
            cost: ArcCost = self.costs[block.name].arc(value.name, source, target)
            shared = self.shares[cost.axis]
            self._step_costs[key] = (
                Seconds(
                    cost.forward_seconds,
                    cost.backward_seconds,
                    cost.forward_comm_seconds if shared else 0.0,
                    cost.backward_comm_seconds if shared else 0.0,
                ),
                cost.forward_kind is None,
            )
        return self._step_costs[key]


def _reachable(moves: Moves, produced: Collection[Placements], needed: Collection[Placements]) -> Moves:
    """Without the states that no production reaches or that lead to no need."""
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for step in moves.steps:
        after.setdefault(step.source, []).append(step.target)
        before.setdefault(step.target, []).append(step.source)
    start = {index for index, state in enumerate(moves.states) if state in produced}
    end = {index for index, state in enumerate(moves.states) if state in needed}
    kept = sorted((_closure(start, after) & _closure(end, before)) | start | end)
    number = {old: new for new, old in enumerate(kept)}
    return Moves(
        tuple(moves.states[old] for old in kept),
        tuple(
            Step(number[step.source], number[step.target], step.seconds, step.alias)
            for step in moves.steps
            if step.source in number and step.target in number
        ),
    )


def _closure(start: Collection[int], edges: Mapping[int, list[int]]) -> set[int]:
    seen, pending = set(start), list(start)
    while pending:
        for other in edges.get(pending.pop(), ()):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return seen
