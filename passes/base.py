"""What a pass is: a frozen dataclass whose `run` turns one valid stage of a block into another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.ir.graph import Arg, Block, Node, Ref, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placement, Placements
from autopar.ir.plan import BlockPlan, Precision
from autopar.ir.text import print_block
from autopar.rules.conversions import Conversion, conversion

CONVERT, CONVERT_MANY, START, WAIT = "ap.convert", "ap.convert_many", "ap.start", "ap.wait"


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may know besides the block. `batch` is the micro-batch of one data-parallel rank."""

    mesh: Mesh
    plan: BlockPlan
    precision: Precision
    batch: int
    micro_batches: int = 1

    @property
    def data_ranks(self) -> int:
        return self.mesh.size_of(DATA_AXIS)


@dataclass(frozen=True, slots=True)
class Stage:
    """A block on its way, and the placement of each of its values. `local` tells that sizes are one rank's.

    `again` are results that the backward makes once more instead of keeping them, `offload` values that are kept on the host.
    """

    block: Block
    placements: Mapping[str, Placements]
    local: bool = False
    again: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return print_block(self.block, self.placements)

    def with_nodes(self, nodes: list[Node]) -> Stage:
        return replace(self, block=replace(self.block, nodes=tuple(nodes)))


class Pass(Protocol):
    """A rewrite with its options as fields."""

    @property
    def name(self) -> str: ...

    def run(self, stage: Stage, context: Context) -> Stage: ...


def map_refs(arg: Arg, operands: Iterator[str]) -> Arg:
    """`arg` with its refs replaced, in order, by the next names of `operands`."""
    if isinstance(arg, Ref):
        return Ref(next(operands))
    if isinstance(arg, tuple):
        return tuple(map_refs(item, operands) for item in arg)
    return arg


def with_operands(node: Node, operands: list[str]) -> Node:
    """`node` reading other values, in the order of `Node.operands()`."""
    names = iter(operands)
    args = tuple(map_refs(arg, names) for arg in node.args)
    return replace(node, args=args, kwargs=tuple((name, map_refs(arg, names)) for name, arg in node.kwargs))


def kwarg(node: Node, name: str) -> str:
    """A text argument of one of autopar's own operations."""
    value = dict(node.kwargs)[name]
    assert isinstance(value, str)
    return value


def move_of(node: Node, stage: Stage, context: Context) -> Conversion:
    """What a conversion node (or the wait or start that it became) does forward and backward."""
    axis = context.mesh.index(kwarg(node, "axis"))
    source, target = stage.placements[node.operands()[0]], stage.placements[node.outputs[0].name]
    found = conversion(source[axis], target[axis], node.outputs[0].differentiable)
    assert found is not None, f"{node.name}: no conversion {source[axis]} -> {target[axis]}"
    return found


def first_uses(block: Block) -> dict[str, int]:
    """For each value the index of the first node that reads it; ``len(nodes)`` for outputs and updates."""
    out: dict[str, int] = {}
    for index, node in enumerate(block.nodes):
        for name in node.operands():
            out.setdefault(name, index)
    for name in (*block.outputs, *(value for _, value in block.updates)):
        out.setdefault(name, len(block.nodes))
    return out


def producers(block: Block) -> dict[str, int]:
    """For each value the index of the node that makes it, -1 for inputs and parameters."""
    out = {value.name: -1 for value in (*block.inputs, *(parameter.value for parameter in block.parameters))}
    out.update((value.name, index) for index, node in enumerate(block.nodes) for value in node.outputs)
    return out


def equal_copies(a: Placement, b: Placement) -> bool:
    """Whether no value changes between the two: only the meaning of the gradient."""
    return str(a) in ("R", "I") and str(b) in ("R", "I")


def fresh(name: str, taken: set[str]) -> str:
    """`name`, or the first of ``name_2, name_3, ...`` that is free; then taken."""
    chosen, number = name, 2
    while chosen in taken:
        chosen, number = f"{name.rstrip('_')}_{number}", number + 1
    taken.add(chosen)
    return chosen


def convert_node(source: Value, name: str, axis: str, move: str, like: Node | None = None) -> Node:
    """``%name = ap.convert(%source, axis, move)``; the shape is the source's until localized."""
    value = replace(source, name=name)
    module, origin = (like.module, like.source) if like else ("", "")
    return Node(CONVERT, (Ref(source.name),), (("axis", axis), ("move", move)), (value,), module, origin)
