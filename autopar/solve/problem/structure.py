"""The choices on one mesh, without prices: strategies of operations, placements of boundary classes, conversion graphs of values.

A structure is made once per mesh and priced for every micro-batch size (`problem.price_structure`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import CONTEXT_AXIS, DATA_AXIS, Mesh
from autopar.ir.placement import Invariant, Placement, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import NodePlan
from autopar.rules.expand import combine_axes
from autopar.rules.loss_chunks import with_chunks
from autopar.solve.problem.boundary import BlockBoundaries, Slot, block_slots
from autopar.solve.problem.conversion_graph import ConversionGraph, conversion_graph
from autopar.solve.problem.data_axis import AxisStrategies, DataAxisPlacements, propagate_data_axis
from autopar.solve.problem.pins import Pin, Pins, operation_text, why_impossible, why_no_axis

Stored = Mapping[str, Placements]
"""Name of a parameter -> the placements in which another program of the same weights stores it."""

Placed = Mapping[str, Mapping[str, Placement]]
"""Name of an input or a result of the graph -> by mesh axis the placement that it is given; replicated on other model axes."""

Consumers = tuple[tuple[str, int], ...]
V = TypeVar("V")


class LazyTable(Mapping[str, V]):
    """A table whose entries are computed when they are first read. `compute` is called once for each of the `keys` that is
    read."""

    def __init__(self, keys: Iterable[str], compute: Callable[[str], V]) -> None:
        self._keys, self._compute = dict.fromkeys(keys), compute
        self._known: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._known:
            if key not in self._keys:
                raise KeyError(key)
            self._known[key] = self._compute(key)
        return self._known[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """The choices of one distinct block. `plans`: the strategies of each node. `same_price_as`: per strategy, the first of its
    node that shards all tensors the same way and so costs the same. `consumers` per value: (node, operand), ("", output) or ("=",
    0) for a buffer's new value. `conversions`: the conversion graph of each value."""

    block: Block
    plans: Mapping[str, tuple[NodePlan, ...]]
    same_price_as: Mapping[str, tuple[int, ...]]
    consumers: Mapping[str, Consumers]
    conversions: Mapping[str, ConversionGraph]


@dataclass(frozen=True, slots=True)
class Structure:
    """The choices of all blocks of a graph on one mesh. `placements` are the allowed ones of each boundary class. `refusal`: why
    pins leave no choice to some operation or parameter; empty where they leave one to all."""

    mesh: Mesh
    boundary: BlockBoundaries
    blocks: Mapping[str, BlockStructure]
    placements: Mapping[int, tuple[Placements, ...]]
    refusal: str = ""


def structure_of(
    graph: Graph, mesh: Mesh, strategies: AxisStrategies, pins: Pins | None = None, fixed: FixedPlacements | None = None
) -> Structure:
    """Return the structure, the same for all batches where the batch is symbolic; placements on the data axis are chosen for the
    graph's own batch.

    `strategies`: those of the graph, shared between its meshes.
    """
    return _Builder(graph, mesh, pins or {}, strategies, fixed or FixedPlacements({}, {})).structure()


class FixedPlacements(NamedTuple):
    """Placements that are not chosen, of parameters (`stored`) and of inputs and results of the graph (`placed`)."""

    stored: Stored
    placed: Placed


class _Builder:
    def __init__(self, graph: Graph, mesh: Mesh, pins: Pins, strategies: AxisStrategies, fixed: FixedPlacements) -> None:
        self.graph, self.mesh, self.strategies = graph, mesh, strategies
        self.boundary = strategies.boundary
        self.data = mesh.index(DATA_AXIS)
        self.pins = {
            key: tuple((mesh.index(pin.axis), pin) for pin in each if pin.axis in mesh.names) for key, each in pins.items()
        }
        self.refusal = why_no_axis(pins, mesh)
        self.stored = {
            self.boundary.classes[Slot(call.block, "param", index)]: fixed.stored[name]
            for call in (graph.calls if fixed.stored else ())
            for index, name in enumerate(call.parameters)
            if name in fixed.stored
        }
        self.placed = {self.boundary.class_of(name): places for name, places in fixed.placed.items()}
        self.propagated = self._data_axis(strategies)
        self._graphs: dict[object, ConversionGraph] = {}
        self.plans = {name: self._plans(block) for name, block in self.boundary.blocks.items()}
        self.ends = {name: self._ends(block) for name, block in self.boundary.blocks.items()}
        self.placements = {number: self._class_placements(number) for number in self.boundary.members}

    def _data_axis(self, strategies: AxisStrategies) -> DataAxisPlacements:
        """The placements on the data axis: of the graph's own batch, where the strategies are those of another one."""
        size = self.mesh.sizes[self.data]
        if strategies.graph is self.graph:
            return strategies.on_data_axis(size)
        return propagate_data_axis(self.graph, size, strategies)

    def structure(self) -> Structure:
        blocks = {name: self._block(block) for name, block in self.boundary.blocks.items()}
        return Structure(self.mesh, self.boundary, blocks, self.placements, self.refusal)

    def _plans(self, block: Block) -> dict[str, tuple[NodePlan, ...]]:
        values = block.values()
        out = {}
        for node in block.nodes:
            per_axis = [
                (self.propagated.strategies[block.name, node.name],)
                if axis == self.data
                else self.strategies.of(block, of.size, of.name)[node.name]
                for axis, of in enumerate(self.mesh.axes)
            ]
            plans = combine_axes(per_axis, node, values, self.mesh.sizes)
            out[node.name] = plans if not self.pins else self._pinned(block, node, plans)
        return with_chunks(block, out)

    def _pinned(self, block: Block, node: Node, plans: tuple[NodePlan, ...]) -> tuple[NodePlan, ...]:
        """The strategies that the pins of results and operands allow."""
        made = [self.pins.get((block.name, value.name), ()) for value in node.outputs]
        read = [self.pins.get((block.name, name), ()) for name in node.operands()]
        if not any((*made, *read)):
            return plans
        out = tuple(
            plan
            for plan in plans
            if all(pin.allows_making(at[n]) for at, pins in zip(plan.results, made, strict=True) for n, pin in pins)
            and all(pin.allows_reading(at[n]) for at, pins in zip(plan.operands, read, strict=True) for n, pin in pins)
        )
        if not out:
            pinned = [(pin, value) for value, pins in zip(node.outputs, made, strict=True) for _, pin in pins]

            def offered(pin: Pin, value: Value) -> list[Placement]:
                index, axis = node.outputs.index(value), self.mesh.index(pin.axis)
                return [plan.results[index][axis] for plan in plans]

            self.refusal = self.refusal or why_impossible(pinned, self.mesh, offered, operation_text(block, node))
        return out

    def _ends(self, block: Block) -> dict[str, tuple[dict[Placements, None], dict[Placements, None]]]:
        """Return per value the placements it is produced in and those it is needed in, over all strategies."""
        out: dict[str, tuple[dict[Placements, None], dict[Placements, None]]] = {name: ({}, {}) for name in block.values()}
        for node in block.nodes:
            names = node.operands()
            for plan in self.plans[block.name][node.name]:
                for value, at in zip(node.outputs, plan.results, strict=True):
                    out[value.name][0][at] = None
                for name, at in zip(names, plan.operands, strict=True):
                    out[name][1][at] = None
        for _, name in block.updates:
            out[name][1][(Replicate(),) * len(self.mesh.sizes)] = None
        return out

    def _class_placements(self, number: int) -> tuple[Placements, ...]:
        """The placements of a boundary class that the pins of its members allow."""
        every = self._unpinned_placements(number)
        slots = self.boundary.members[number] if self.pins else ()
        pins = [(pin, self.boundary.value(slot)) for slot in slots for _, pin in self._pins_at(slot)]
        if not pins:
            return every
        axes = [(self.mesh.index(pin.axis), pin) for pin, _ in pins]
        allowed = tuple(at for at in every if all(pin.allows(at[axis]) for axis, pin in axes))
        if not allowed:

            def offered(pin: Pin, value: Value) -> list[Placement]:
                return [at[self.mesh.index(pin.axis)] for at in every]

            self.refusal = self.refusal or why_impossible(pins, self.mesh, offered, self._class_text(number))
        return allowed

    def _pins_at(self, slot: Slot) -> tuple[tuple[int, Pin], ...]:
        return self.pins.get((slot.block, self.boundary.value(slot).name), ())

    def _class_text(self, number: int) -> str:
        """Name a boundary class: its parameters, which are tied, or its value between blocks."""
        names = dict.fromkeys(
            name
            for call in self.graph.calls
            for index, name in enumerate(call.parameters)
            if self.boundary.classes[Slot(call.block, "param", index)] == number
        )
        slot = self.boundary.members[number][0]
        return next(iter(names)) if names else f"{self.boundary.value(slot).name} of {slot.block}, between blocks,"

    def _unpinned_placements(self, number: int) -> tuple[Placements, ...]:
        """The placements of a boundary class: whatever its members use, but never Partial on a model axis."""
        slots = self.boundary.members[number]
        values = [self.boundary.value(slot) for slot in slots]
        differentiable = all(value.differentiable for value in values)
        data = self.propagated.classes[number]
        replicated: Placement = Invariant() if differentiable else Replicate()
        if number == self.boundary.class_of(self.graph.loss):
            return ((replicated,) * len(self.mesh.sizes),)
        if number in {self.boundary.class_of(value.name) for value in self.graph.inputs}:
            places = self.placed.get(number, {})
            return (
                tuple(data if n == self.data else places.get(each.name, Replicate()) for n, each in enumerate(self.mesh.axes)),
            )
        if number in self.stored:
            whole = [Replicate(), Invariant()]  # which of them depends on whether it trains
            fixed = tuple(replicated if place in whole else place for place in self.stored[number])
            summed = {self.data: data} | {n: Replicate() for n, each in enumerate(self.mesh.axes) if each.name == CONTEXT_AXIS}
            return (tuple(summed.get(axis, place) for axis, place in enumerate(fixed)),)
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
            shards: list[Placement] = [place for place in used if isinstance(place, Shard)]
            if not parameter and differentiable:
                shards.append(Replicate())
            per_axis.append(dict.fromkeys([data] if axis == self.data else [Replicate() if buffer else replicated, *shards]))
        allowed = tuple(at for at in product(*per_axis) if can_shard(values[0].shape, at, self.mesh.sizes))
        if number in self.placed:
            allowed = tuple(at for at in allowed if self._as_placed(at, self.placed[number]))
        return allowed

    def _as_placed(self, at: Placements, places: Mapping[str, Placement]) -> bool:
        """Return whether a result is sharded as it is to be; a replicated one may take gradients or not."""
        return all(
            place == places.get(axis.name) if axis.name in places else not isinstance(place, Shard)
            for axis, place in zip(self.mesh.axes, at, strict=True)
            if axis.name != DATA_AXIS
        )

    def _block(self, block: Block) -> BlockStructure:
        values, plans = block.values(), self.plans[block.name]
        consumers = _consumers(block, plans)
        at: dict[str, list[Slot]] = {}
        for slot, name in block_slots(block):
            at.setdefault(name, []).append(slot)

        def graph_of(name: str) -> ConversionGraph:
            produced, needed = (dict.fromkeys(side) for side in self.ends[block.name][name])
            for slot in at.get(name, ()):
                (needed if slot.side == "out" else produced).update(dict.fromkeys(self.placements[self.boundary.classes[slot]]))
            value, pins = values[name], self.pins.get((block.name, name), ())
            # states are in the order of the ends: a graph of another order would be that of whoever reads first
            key = (value.shape, value.dtype, value.differentiable, tuple(produced), tuple(needed), pins)
            if key not in self._graphs:
                self._graphs[key] = conversion_graph(value, self.mesh.sizes, produced, needed, dict(pins))
            return self._graphs[key]

        same_price_as = {name: _same_price(each) for name, each in plans.items()}
        return BlockStructure(block, plans, same_price_as, consumers, LazyTable(consumers, graph_of))


def _consumers(block: Block, plans: Mapping[str, Collection[NodePlan]]) -> dict[str, Consumers]:
    """The readers of each value. Operands of one node that always agree are one consumer."""
    consumers: dict[str, list[tuple[str, int]]] = {}
    for node in block.nodes:
        names = node.operands()
        for index, name in enumerate(names):
            first = names.index(name)
            if first == index or any(plan.operands[index] != plan.operands[first] for plan in plans[node.name]):
                consumers.setdefault(name, []).append((node.name, index))
    for index, name in enumerate(block.outputs):
        consumers.setdefault(name, []).append(("", index))
    for _, name in block.updates:
        consumers.setdefault(name, []).append(("=", 0))
    return {name: tuple(each) for name, each in consumers.items()}


def _same_price(plans: Collection[NodePlan]) -> tuple[int, ...]:
    """Return per strategy the number of the first that shards every tensor the same way and calls the same function."""
    first: dict[object, int] = {}
    out = []
    for index, plan in enumerate(plans):
        cut = tuple(
            (place.dim, place.parts) if type(place) is Shard else None
            for placements in (*plan.operands, *plan.results)
            for place in placements
        )
        key = (cut, plan.function, plan.factors if plan.function else ())
        out.append(first.setdefault(key, index))
    return tuple(out)
