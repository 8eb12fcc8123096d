"""The boundaries where blocks meet: which inputs, outputs and parameters of which blocks must agree on a placement, and which
calls follow each other.

A graph value has one placement between calls, and all calls of a block share one plan. So the slots of all blocks that read or
write one graph value (or one original parameter) form an equivalence class, a *boundary class*, with one placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from networkx.utils import UnionFind

from autopar.ir.graph import Block, Graph, Parameter, Value

Side = Literal["in", "out", "param"]


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Input, output or parameter number `index` of a distinct block."""

    block: str
    side: Side
    index: int


@dataclass(frozen=True, slots=True)
class CallKind:
    """Calls of a block that own the same parameters alone (`own` per parameter slot; the others are shared between calls)."""

    block: str
    own: tuple[bool, ...]


def block_slots(block: Block) -> Iterator[tuple[Slot, str]]:
    """Yield each slot of a block with the name of its value there."""
    sides: tuple[tuple[Side, list[str]], ...] = (
        ("in", [value.name for value in block.inputs]),
        ("out", list(block.outputs)),
        ("param", [parameter.value.name for parameter in block.parameters]),
    )
    for side, names in sides:
        yield from ((Slot(block.name, side, index), name) for index, name in enumerate(names))


class BlockBoundaries:
    """The graph's slots, boundary classes and kinds of calls.

    `blocks`: the distinct blocks that are called. `call_kinds`: one per call, the only table that grows with depth. `shared`:
    per parameter that several calls use, the last slot that reads it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.blocks: dict[str, Block] = {block.name: block for block in graph.blocks if graph.count(block.name)}
        self._joined = UnionFind()
        users = Counter(name for call in graph.calls for name in set(call.parameters))
        self.call_kinds: list[CallKind] = []
        self.shared: dict[str, Slot] = {}
        for call in graph.calls:
            sides: tuple[tuple[Side, tuple[str, ...]], ...] = (
                ("in", call.inputs),
                ("out", call.outputs),
                ("param", call.parameters),
            )
            for side, names in sides:
                for index, name in enumerate(names):
                    self._joined.union((side == "param", name), Slot(call.block, side, index))
            self.call_kinds.append(CallKind(call.block, tuple(users[name] == 1 for name in call.parameters)))
            self.shared.update((n, Slot(call.block, "param", i)) for i, n in enumerate(call.parameters) if users[n] > 1)

    @cached_property
    def classes(self) -> dict[Slot, int]:
        """The boundary class of every slot, numbered in the order of `slots`."""
        numbers: dict[object, int] = {}
        return {slot: numbers.setdefault(self._joined[slot], len(numbers)) for slot in self.slots()}

    def slots(self) -> list[Slot]:
        """Every slot of every block that is called."""
        return [slot for block in self.blocks.values() for slot, _ in block_slots(block)]

    def class_of(self, name: str, parameter: bool = False) -> int | None:
        """The class of a graph value or an original parameter name; None where no call reads or writes it."""
        return self._class_of_root.get(self._joined[parameter, name])

    @cached_property
    def _class_of_root(self) -> dict[object, int]:
        return {self._joined[slot]: number for slot, number in self.classes.items()}

    def value(self, slot: Slot) -> Value:
        """The block's value at a slot."""
        block = self.blocks[slot.block]
        if slot.side == "in":
            return block.inputs[slot.index]
        if slot.side == "param":
            return block.parameters[slot.index].value
        return block.values()[block.outputs[slot.index]]

    def parameter(self, slot: Slot) -> Parameter:
        """The block's parameter at a slot of side "param"."""
        return self.blocks[slot.block].parameters[slot.index]

    @cached_property
    def members(self) -> dict[int, tuple[Slot, ...]]:
        """The slots of every class."""
        out: dict[int, list[Slot]] = {}
        for slot, number in self.classes.items():
            out.setdefault(number, []).append(slot)
        return {number: tuple(slots) for number, slots in out.items()}

    @cached_property
    def kind_counts(self) -> Counter[CallKind]:
        """Calls of each kind."""
        return Counter(self.call_kinds)
