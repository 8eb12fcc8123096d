"""Candidates without a solver: strategies drawn from the rules by a seed, conversions along shortest ways.

Any of them must train like one process: what the solver chooses among is tested apart from how it chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import networkx

from autopar.ir.dims import has_batch
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan, Precision
from autopar.rules.conversions import placement_states
from autopar.rules.expand import block_strategies, combine_axes
from autopar.rules.registry import default_registry
from support.plans.conversion_graph import single_axis_conversions


def unsharded(value: Value) -> Placement:
    return Invariant() if value.differentiable else Replicate()


def drawn_candidate(
    graph: Graph, mesh: Mesh, seed: int = 0, *, zero: int = 0, wild: float = 0.3, precision: Precision | None = None
) -> Candidate:
    """A candidate that is valid but not chosen for speed. `wild` is the share of operations that ignore where operands are.

    ``wild=0`` with model axes of one rank is data parallelism.
    """
    drawer = _Drawer(graph, mesh, seed, wild)
    plans = tuple(drawer.block(block, zero) for block in graph.blocks)
    return Candidate(mesh, plans, graph.batch, precision or Precision())


class _Drawer:
    def __init__(self, graph: Graph, mesh: Mesh, seed: int, wild: float) -> None:
        self.graph, self.mesh, self.seed, self.wild = graph, mesh, seed, wild
        self.random = Random(seed)

    def boundary(self, name: str, value: Value) -> Placements:
        """Where a value is between blocks: the same for all of equal shape."""
        if name == self.graph.loss:
            return (Replicate() if self.graph.forward_only else Invariant(),) * len(self.mesh.axes)
        given = any(name == each.name for each in self.graph.inputs)
        out: list[Placement] = []
        for axis in self.mesh.axes:
            if axis.name == DATA_AXIS:
                out.append(Shard(0) if value.shape and has_batch(value.shape[0]) else Replicate() if given else unsharded(value))
            else:
                out.append(Replicate() if given else self._by_shape(value, axis, tuple(out)))
        return tuple(out)

    def parameter(self, value: Value) -> Placements:
        out: list[Placement] = []
        for axis in self.mesh.axes:
            out.append(Replicate() if axis.name == DATA_AXIS else self._by_shape(value, axis, tuple(out)))
        return tuple(out)

    def _by_shape(self, value: Value, axis: Axis, before: Placements) -> Placement:
        random = Random(f"{self.seed} {value.shape} {axis.name}")
        options: list[Placement] = [unsharded(value)]
        if value.differentiable:
            options += [Shard(dim) for dim, size in enumerate(value.shape) if isinstance(size, int) and size > 1]
        sizes = self.mesh.sizes[: len(before) + 1]
        return random.choice([each for each in options if can_shard(value.shape, (*before, each), sizes)])

    def block(self, block: Block, zero: int) -> BlockPlan:
        call = next(call for call in self.graph.calls if call.block == block.name)
        inputs = tuple(self.boundary(name, value) for name, value in zip(call.inputs, block.inputs, strict=True))
        parameters = tuple(self.parameter(parameter.value) for parameter in block.parameters)
        values = block.values()
        outputs = tuple(self.boundary(name, values[inner]) for name, inner in zip(call.outputs, block.outputs, strict=True))
        produced = {value.name: where for value, where in zip(block.inputs, inputs, strict=True)}
        produced |= {p.value.name: where for p, where in zip(block.parameters, parameters, strict=True)}
        registry = default_registry()
        per_axis = [
            block_strategies(
                block,
                axis.size,
                batch_axis=axis.name == DATA_AXIS,
                batch_is_symbolic=self.graph.batch_is_symbolic,
                registry=registry,
            )
            for axis in self.mesh.axes
        ]
        nodes: list[NodePlan] = []
        needs: dict[str, list[Placements]] = {}
        for node in block.nodes:
            options = combine_axes([axis[node.name] for axis in per_axis], node, values, self.mesh.sizes)
            plan = self._choose(node, options, produced)
            nodes.append(plan)
            for name, where in zip(node.operands(), plan.operands, strict=True):
                needs.setdefault(name, []).append(where)
            produced.update((value.name, where) for value, where in zip(node.outputs, plan.results, strict=True))
        for name, where in zip(block.outputs, outputs, strict=True):
            needs.setdefault(name, []).append(where)
        ways = [arc for name, wanted in needs.items() for arc in self.ways(values[name], produced[name], wanted)]
        return BlockPlan(block.name, inputs, parameters, outputs, tuple(nodes), tuple(ways), zero)

    def _choose(self, node: Node, options: Sequence[NodePlan], produced: dict[str, Placements]) -> NodePlan:
        def cost(plan: NodePlan) -> int:
            pairs = zip(node.operands(), plan.operands, strict=True)
            moved = sum(_distance(a, b) for name, where in pairs for a, b in zip(produced[name], where, strict=True))
            return moved * 4 + sum(label == "redundant" for label in plan.factors)

        if self.random.random() < self.wild:
            return self.random.choice(options)
        return min(options, key=cost)

    def ways(self, value: Value, source: Placements, wanted: Sequence[Placements]) -> list[Conversion]:
        """A tree of conversions from where the value is made to all places where it is needed."""
        replicated = (Replicate(),) * len(self.mesh.axes)
        among = placement_states(value.shape, (source, *wanted, replicated), self.mesh.sizes, value.differentiable)
        graph = networkx.DiGraph(list(single_axis_conversions(value.shape, among, self.mesh.sizes, value.differentiable)))
        graph.add_node(source)
        parents = dict((target, before) for before, target in networkx.bfs_edges(graph, source))
        out: dict[Placements, Conversion] = {}
        for target in wanted:
            while target != source and target not in out:
                assert target in parents, f"{value}: {source} does not reach {target}"
                out[target] = Conversion(value.name, parents[target], target)
                target = parents[target]
        return list(out.values())


def _distance(source: Placement, target: Placement) -> int:
    if source == target:
        return 0
    return 1 if isinstance(target, (Shard, Partial)) or source == Invariant() else 3
