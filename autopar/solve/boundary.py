"""Where blocks meet: which slots of which blocks must agree on a placement, and in which orders blocks follow each other.

A graph value has one placement between calls, and all calls of a block share one plan; so slots are joined (union-find) with
the graph values and the original parameter names that they stand for. A *class* is one set of slots that agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.ir.graph import Block, Graph, Parameter, Value

Side = Literal["in", "out", "param"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Input, output or parameter number `index` of a distinct block."""

    block: str
    side: Side
    index: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls of a block that own the same parameters alone (`own` per parameter slot; the others are shared between calls)."""

    block: str
    own: tuple[bool, ...]


class Boundary:
    """The graph's slots, classes and call kinds. Nothing grows with depth but `kinds`, one number per call."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.blocks: dict[str, Block] = {block.name: block for block in graph.blocks if graph.count(block.name)}
        self._parent: dict[object, object] = {}
        users = Counter(name for call in graph.calls for name in set(call.parameters))
        self.kinds: list[Kind] = []
        self.shared: dict[str, Slot] = {}
        for call in graph.calls:
            sides: tuple[tuple[Side, tuple[str, ...]], ...] = (
                ("in", call.inputs),
                ("out", call.outputs),
                ("param", call.parameters),
            )
            for side, names in sides:
                for index, name in enumerate(names):
                    self._union((side == "param", name), Slot(call.block, side, index))
            self.kinds.append(Kind(call.block, tuple(users[name] == 1 for name in call.parameters)))
            self.shared.update((n, Slot(call.block, "param", i)) for i, n in enumerate(call.parameters) if users[n] > 1)

    def _find(self, item: object) -> object:
        while (above := self._parent.get(item, item)) != item:
            self._parent[item] = self._parent.get(above, above)
            item = above
        return item

    def _union(self, first: object, second: object) -> None:
        self._parent[self._find(first)] = self._find(second)

    @cached_property
    def classes(self) -> dict[Slot, int]:
        """The class of every slot."""
        numbers: dict[object, int] = {}
        return {slot: numbers.setdefault(self._find(slot), len(numbers)) for slot in self.slots()}

    def slots(self) -> list[Slot]:
        """Every slot of every block that is called."""
        out: list[Slot] = []
        for block in self.blocks.values():
            out += [Slot(block.name, "in", index) for index in range(len(block.inputs))]
            out += [Slot(block.name, "out", index) for index in range(len(block.outputs))]
            out += [Slot(block.name, "param", index) for index in range(len(block.parameters))]
        return out

    def class_of(self, name: str, parameter: bool = False) -> int | None:
        """The class of a graph value or an original parameter name; None where no call reads or writes it."""
        root = self._find((parameter, name))
        return next((number for slot, number in self.classes.items() if self._find(slot) == root), None)

    def value(self, slot: Slot) -> Value:
        """The block's value at a slot."""
        block = self.blocks[slot.block]
        if slot.side == "in":
            return block.inputs[slot.index]
        if slot.side == "param":
            return block.parameters[slot.index].value
        return block.values()[block.outputs[slot.index]]

    def parameter(self, slot: Slot) -> Parameter:
        return self.blocks[slot.block].parameters[slot.index]

    @cached_property
    def members(self) -> dict[int, tuple[Slot, ...]]:
        """The slots of every class."""
        out: dict[int, list[Slot]] = {}
        for slot, number in self.classes.items():
            out.setdefault(number, []).append(slot)
        return {number: tuple(slots) for number, slots in out.items()}

    @cached_property
    def kind_counts(self) -> Counter[Kind]:
        return Counter(self.kinds)

    @cached_property
    def forward_steps(self) -> Counter[tuple[Kind, Kind | None]]:
        """(call, next call) with counts."""
        return Counter(zip(self.kinds, [*self.kinds[1:], None], strict=True))

    @cached_property
    def backward_steps(self) -> Counter[tuple[Kind | None, Kind, Kind | None]]:
        """(later call, call, earlier call) with counts: while `call` runs backward, `later` is reduced and `earlier` gathered."""
        return Counter(zip([*self.kinds[1:], None], self.kinds, [None, *self.kinds[:-1]], strict=True))
