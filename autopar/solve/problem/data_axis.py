"""Placements on the data axis: propagated along the graph, not searched.

Inputs arrive as ``S(0)`` where they have a batch dimension, parameters are ``R`` (their gradients are reduced by FSDP2 or in
buckets), and each operation takes the strategy whose operands need the least communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import DATA_AXIS, EXPERT_AXIS
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard
from autopar.rules.conversions import COLLECTIVES, axis_conversion
from autopar.rules.expand import block_strategies
from autopar.rules.registry import AxisStrategy, Registry
from autopar.solve.problem.boundary import BlockBoundaries, Slot, block_slots

_LOCAL = 0.01
"""Cost of a local copy, relative to a collective on as many bytes."""

_PADDED = 2.0
"""Cost of padding a shard with zeros to a Partial, which has to be reduced afterwards."""


@dataclass(frozen=True, slots=True)
class DataAxisPlacements:
    """The placements on the data axis: the strategy of every (block, node), and the placement of every boundary class."""

    strategies: Mapping[tuple[str, str], AxisStrategy]
    classes: Mapping[int, Placement]


def follows_batch(value: Value, graph: Graph) -> bool:
    """Return whether a graph input is sharded along dimension 0."""
    if not value.shape:
        return False
    return dims.has_batch(value.shape[0]) if graph.batch_is_symbolic else value.shape[0] == graph.batch


class AxisStrategies:
    """The `block_strategies` of one graph by block and axis size, and its boundary, which all meshes of a search share."""

    def __init__(self, graph: Graph, registry: Registry) -> None:
        self.graph, self.registry = graph, registry
        self.boundary = BlockBoundaries(graph)
        self._known: dict[tuple[str, int, str], dict[str, tuple[AxisStrategy, ...]]] = {}
        self._propagated: dict[int, DataAxisPlacements] = {}

    def on_data_axis(self, size: int) -> DataAxisPlacements:
        """Return the placements on a data axis of this size, which many meshes have."""
        if size not in self._propagated:
            self._propagated[size] = propagate_data_axis(self.graph, size, self)
        return self._propagated[size]

    def of(self, block: Block, size: int, axis: str) -> dict[str, tuple[AxisStrategy, ...]]:
        """Return the strategies by node name, on an axis of this name; all but the data axis and `EXPERT_AXIS` have the same
        strategies."""
        key = block.name, size, axis if axis in (DATA_AXIS, EXPERT_AXIS) else ""
        if key not in self._known:
            self._known[key] = block_strategies(
                block, size, batch_axis=axis == DATA_AXIS, batch_is_symbolic=self.graph.batch_is_symbolic,
                registry=self.registry, any_size=axis == EXPERT_AXIS,
            )  # fmt: skip
        return self._known[key]


def propagate_data_axis(graph: Graph, size: int, strategies: AxisStrategies) -> DataAxisPlacements:
    """Propagate placements by walking the calls once. A distinct block is decided at its first call; its other calls agree
    through their boundary classes. Where a number is carried on and summands are added to it (a loss of each layer), it is a sum
    from its first value on: the walk begins anew."""
    given, sums = _outer_placements(graph, strategies.boundary), set[int]()
    while (found := _walk_calls(graph, size, strategies, given, sums)) is None:
        pass
    return found


def _outer_placements(graph: Graph, boundary: BlockBoundaries) -> dict[int, Placement]:
    """Return the placements of the boundary classes of the loss, inputs and parameters."""
    classes: dict[int, Placement] = {}
    loss = boundary.class_of(graph.loss)
    assert loss is not None
    classes[loss] = Replicate() if graph.forward_only else Invariant()
    for value in graph.inputs:
        number = boundary.class_of(value.name)
        if number is not None:
            classes[number] = Shard(0) if follows_batch(value, graph) else Replicate()
    for slot, number in boundary.classes.items():
        if slot.side == "param":
            classes[number] = Replicate()
    return classes


def _walk_calls(
    graph: Graph, size: int, strategies: AxisStrategies, given: Mapping[int, Placement], sums: set[int]
) -> DataAxisPlacements | None:
    """Walk the calls with these boundary classes as sums. Return None where one more is, which is added to `sums`."""
    boundary, classes = strategies.boundary, {**dict.fromkeys(sums, Partial()), **given}
    chosen: dict[tuple[str, str], AxisStrategy] = {}
    seen: set[str] = set()
    for call in graph.calls:
        if call.block in seen:
            continue
        seen.add(call.block)
        block = boundary.blocks[call.block]
        start = {name: classes[boundary.classes[slot]] for slot, name in block_slots(block) if slot.side != "out"}
        options = strategies.of(block, size, DATA_AXIS)
        walk = _Walk(block, size, graph, start)
        for node in block.nodes:
            chosen[block.name, node.name] = walk.choose(node, options[node.name])
        for index, name in enumerate(block.outputs):
            number, produced = boundary.classes[Slot(block.name, "out", index)], walk.produced[name]
            whole = classes.setdefault(number, produced) == Replicate() and number not in given
            if whole and produced == Partial() and not walk.values[name].shape:
                sums.add(number)
                return None
    return DataAxisPlacements(chosen, classes)


class _Walk:
    """The walk through one block: `available` are the placements that each value has been converted to so far."""

    def __init__(self, block: Block, size: int, graph: Graph, start: Mapping[str, Placement]) -> None:
        self.size, self.graph = size, graph
        self.values = block.values()
        self.produced: dict[str, Placement] = dict(start)
        self.available: dict[str, list[Placement]] = {name: [placement] for name, placement in start.items()}

    def choose(self, node: Node, options: tuple[AxisStrategy, ...]) -> AxisStrategy:
        names = node.operands()
        sharded = any(isinstance(self.produced[name], Shard) for name in names)
        batched = any(dims.has_batch(size) for value in node.outputs for size in value.shape)

        moved: dict[tuple[str, Placement], float] = {}

        def cost(strategy: AxisStrategy) -> tuple[float, int]:
            needed = dict.fromkeys(zip(names, strategy.operands, strict=True))  # a set would be summed in the order of hashes
            moved.update((each, self._conversion_cost(*each)) for each in needed if each not in moved)
            bytes_moved = sum(moved[each] for each in needed)
            shards = any(isinstance(place, Shard) for place in (*strategy.operands, *strategy.results))
            return bytes_moved, int(shards != (sharded or (batched and self.graph.batch_is_symbolic)))

        chosen = min(options, key=cost)
        for name, to in zip(names, chosen.operands, strict=True):
            if to not in self.available[name]:
                self.available[name].append(to)
        for value, placement in zip(node.outputs, chosen.results, strict=True):
            self.produced[value.name] = placement
            self.available[value.name] = [placement]
        return chosen

    def _conversion_cost(self, name: str, target: Placement) -> float:
        """The least bytes sent from any placement that the value has, in at most two conversions."""
        if target in self.available[name]:
            return 0.0
        middle: tuple[Placement, ...] = (Replicate(), Invariant(), Partial())
        paths = [self._direct_cost(name, source, target) for source in self.available[name]]
        paths += [
            self._direct_cost(name, s, m) + self._direct_cost(name, m, target) for s in self.available[name] for m in middle
        ]
        return min(paths)

    def _direct_cost(self, name: str, source: Placement, target: Placement) -> float:
        value = self.values[name]
        if source == target:
            return 0.0
        conversion = axis_conversion(source, target, value.differentiable)
        if conversion is None:
            return float("inf")
        size = prod(dims.shape_at(value.shape, self.graph.batch)) * itemsize(value.dtype)
        backward = 0.0 if conversion.backward == "pad" else self._weight(conversion.backward)
        return size * (self._weight(conversion.forward) + backward)

    def _weight(self, kind: str | None) -> float:
        if kind is None:
            return 0.0
        if kind not in COLLECTIVES:
            return _PADDED if kind == "pad" else _LOCAL
        return {"all_reduce": 2.0, "all_to_all": 1 / max(2, self.size)}.get(kind, 1.0)
