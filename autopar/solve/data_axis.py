"""Placements on the data axis: propagated along the graph, not searched.

Inputs arrive as ``S(0)`` where they have the batch, parameters are ``R`` (their gradients are summed by FSDP2 or buckets), and
each operation takes the strategy whose operands are reached by the least communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.cost_models.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard
from autopar.rules.conversions import COLLECTIVES, conversion
from autopar.rules.expand import block_strategies
from autopar.rules.registry import Registry
from autopar.rules.strategy import AxisStrategy
from autopar.solve.boundary import Boundary, Slot

_LOCAL = 0.01
"""What a local copy costs beside sending as many bytes."""

_PADDED = 2.0
"""A shard made into a summand of the whole has to be summed later."""


@dataclass(frozen=True, slots=True)
class DataAxis:
    """The strategy of every (block, node), and the placement of every boundary class."""

    strategies: Mapping[tuple[str, str], AxisStrategy]
    classes: Mapping[int, Placement]


def follows_batch(value: Value, graph: Graph) -> bool:
    """Whether a graph input is cut along dimension 0."""
    if not value.shape:
        return False
    return dims.has_batch(value.shape[0]) if graph.batch_is_symbolic else value.shape[0] == graph.batch


class AxisStrategies:
    """`block_strategies` of one graph by block and axis size, each worked out once, and its boundary: what meshes have in
    common."""

    def __init__(self, graph: Graph, registry: Registry) -> None:
        self.graph, self.registry = graph, registry
        self.boundary = Boundary(graph)
        self._known: dict[tuple[str, int, str], dict[str, tuple[AxisStrategy, ...]]] = {}

    def of(self, block: Block, size: int, axis: str) -> dict[str, tuple[AxisStrategy, ...]]:
        """By node name, on an axis of this name; all but the data axis and `EXPERT_AXIS` are alike."""
        key = block.name, size, axis if axis in (DATA_AXIS, EXPERT_AXIS) else ""
        if key not in self._known:
            self._known[key] = block_strategies(
                block, size, batch_axis=axis == DATA_AXIS, batch_is_symbolic=self.graph.batch_is_symbolic,
                registry=self.registry, any_size=axis == EXPERT_AXIS,
            )  # fmt: skip
        return self._known[key]


def propagate(
    graph: Graph, boundary: Boundary, size: int, registry: Registry, strategies: AxisStrategies | None = None
) -> DataAxis:
    """Walks the calls once; a distinct block is decided at its first call and its other calls agree by their classes."""
    classes: dict[int, Placement] = {}
    loss = boundary.class_of(graph.loss)
    assert loss is not None
    classes[loss] = Invariant()
    for value in graph.inputs:
        number = boundary.class_of(value.name)
        if number is not None:
            classes[number] = Shard(0) if follows_batch(value, graph) else Replicate()
    for slot, number in boundary.classes.items():
        if slot.side == "param":
            classes[number] = Replicate()
    known = strategies or AxisStrategies(graph, registry)
    chosen: dict[tuple[str, str], AxisStrategy] = {}
    seen: set[str] = set()
    for call in graph.calls:
        if call.block in seen:
            continue
        seen.add(call.block)
        block = boundary.blocks[call.block]
        start = {
            value.name: classes[boundary.classes[Slot(block.name, side, index)]]  # type: ignore[arg-type]
            for side, values in (("in", block.inputs), ("param", tuple(p.value for p in block.parameters)))
            for index, value in enumerate(values)
        }
        options = known.of(block, size, DATA_AXIS)
        walk = _Walk(block, size, graph, start)
        for node in block.nodes:
            chosen[block.name, node.name] = walk.choose(node, options[node.name])
        for index, name in enumerate(block.outputs):
            classes.setdefault(boundary.classes[Slot(block.name, "out", index)], walk.produced[name])
    return DataAxis(chosen, classes)


class _Walk:
    """One block: which placements each value has been brought to so far."""

    def __init__(self, block: Block, size: int, graph: Graph, start: Mapping[str, Placement]) -> None:
        self.size, self.graph = size, graph
        self.values = block.values()
        self.produced: dict[str, Placement] = dict(start)
        self.have: dict[str, list[Placement]] = {name: [placement] for name, placement in start.items()}

    def choose(self, node: Node, options: tuple[AxisStrategy, ...]) -> AxisStrategy:
        names = node.operands()
        sharded = any(isinstance(self.produced[name], Shard) for name in names)
        batched = any(dims.has_batch(size) for value in node.outputs for size in value.shape)

        def cost(strategy: AxisStrategy) -> tuple[float, int]:
            moved = sum(self._reach(name, to) for name, to in {*zip(names, strategy.operands, strict=True)})
            cuts = any(isinstance(place, Shard) for place in (*strategy.operands, *strategy.results))
            return moved, int(cuts != (sharded or (batched and self.graph.batch_is_symbolic)))

        chosen = min(options, key=cost)
        for name, to in zip(names, chosen.operands, strict=True):
            if to not in self.have[name]:
                self.have[name].append(to)
        for value, placement in zip(node.outputs, chosen.results, strict=True):
            self.produced[value.name] = placement
            self.have[value.name] = [placement]
        return chosen

    def _reach(self, name: str, target: Placement) -> float:
        """The least bytes from any placement that the value has, in at most two steps."""
        if target in self.have[name]:
            return 0.0
        middle: tuple[Placement, ...] = (Replicate(), Invariant(), Partial())
        ways = [self._step(name, source, target) for source in self.have[name]]
        ways += [self._step(name, s, m) + self._step(name, m, target) for s in self.have[name] for m in middle]
        return min(ways)

    def _step(self, name: str, source: Placement, target: Placement) -> float:
        value = self.values[name]
        if source == target:
            return 0.0
        found = conversion(source, target, value.differentiable)
        if found is None:
            return float("inf")
        size = prod(dims.values(value.shape, self.graph.batch)) * itemsize(value.dtype)
        backward = 0.0 if found.backward == "pad" else self._weight(found.backward)
        return size * (self._weight(found.forward) + backward)

    def _weight(self, kind: str | None) -> float:
        if kind is None:
            return 0.0
        if kind not in COLLECTIVES:
            return _PADDED if kind == "pad" else _LOCAL
        return {"all_reduce": 2.0, "all_to_all": 1 / max(2, self.size)}.get(kind, 1.0)
