"""The contract of a pass: a frozen dataclass, its options as fields, whose `run` turns one valid `BlockState` into another.

Besides: what passes share, such as fresh names, producers and first uses of values, and the node of a placement conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.ir.graph import Block, Node, Ref, Value
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Placement, Placements
from autopar.ir.plan import BlockPlan, Precision
from autopar.ir.text import format_block
from autopar.operations.communication import CONVERT
from autopar.rules.conversions import AxisConversion, axis_conversion


@dataclass(frozen=True, slots=True)
class Context:
    """The knowledge of a pass besides the block. `batch` is the micro-batch of one data-parallel rank, in examples; with `uneven`
    data ranks have uneven shards of the batch, and it is the largest."""

    mesh: Mesh
    plan: BlockPlan
    precision: Precision
    batch: int
    micro_batches: int = 1
    uneven: bool = False

    @property
    def data_ranks(self) -> int:
        return self.mesh.size_of(DATA_AXIS)


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block between two passes, with the placement of each of its values.

    Attributes:
        local: whether shapes are those of one rank (after `Localize`), else global.
        recomputed: results that are not saved: the backward recomputes them.
        offloaded: values that are offloaded to host memory between forward and backward.
        partitioned: (value, axis) of values that each rank of the axis saves one part of.
    """

    block: Block
    placements: Mapping[str, Placements]
    local: bool = False
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    partitioned: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        return format_block(self.block, self.placements)

    def with_nodes(self, nodes: list[Node]) -> BlockState:
        return replace(self, block=replace(self.block, nodes=tuple(nodes)))


class Pass(Protocol):
    """A rewrite of one block. Its docstring shows the IR before and after."""

    @property
    def name(self) -> str: ...

    def run(self, state: BlockState, context: Context) -> BlockState: ...


def text_kwarg(node: Node, name: str) -> str:
    """A text argument of one of autopar's own operations."""
    value = dict(node.kwargs)[name]
    assert isinstance(value, str)
    return value


def conversion_of(node: Node, state: BlockState, context: Context) -> AxisConversion:
    """The collectives of a conversion node, or of the start that it became, forward and backward."""
    axis = context.mesh.index(text_kwarg(node, "axis"))
    source, target = state.placements[node.operands()[0]], state.placements[node.outputs[0].name]
    conversion = axis_conversion(source[axis], target[axis], node.outputs[0].differentiable)
    assert conversion is not None, f"{node.name}: no conversion {source[axis]} -> {target[axis]}"
    return conversion


def first_use_indices(block: Block) -> dict[str, int]:
    """Return for each value the index of the first node that reads it; ``len(nodes)`` for outputs and updates."""
    out: dict[str, int] = {}
    for index, node in enumerate(block.nodes):
        for name in node.operands():
            out.setdefault(name, index)
    for name in (*block.outputs, *(value for _, value in block.updates)):
        out.setdefault(name, len(block.nodes))
    return out


def producer_indices(block: Block) -> dict[str, int]:
    """Return for each value the index of the node that produces it, -1 for inputs and parameters."""
    out = {value.name: -1 for value in (*block.inputs, *(parameter.value for parameter in block.parameters))}
    out.update((value.name, index) for index, node in enumerate(block.nodes) for value in node.outputs)
    return out


def only_gradient_changes(a: Placement, b: Placement) -> bool:
    """Return whether a conversion changes no value: Replicate and Invariant differ in the gradient's placement only."""
    return str(a) in ("R", "I") and str(b) in ("R", "I")


def fresh_name(name: str, names: set[str]) -> str:
    """Return `name`, or the first of ``name_2, name_3, ...`` that is not in `names`, which gets it."""
    chosen, number = name, 2
    while chosen in names:
        chosen, number = f"{name.rstrip('_')}_{number}", number + 1
    names.add(chosen)
    return chosen


def convert_node(source: Value, name: str, axis: str, change: str, like: Node | None = None) -> Node:
    """Return ``%name = ap.convert(%source, axis, change)``, `change` like ``S(1) -> R``. The shape is the source's until
    localized.

    Module and source line are those of `like`.
    """
    module, origin = (like.module, like.source) if like else ("", "")
    kwargs = (("axis", axis), ("conversion", change))
    return Node(CONVERT, (Ref(source.name),), kwargs, (replace(source, name=name),), module, origin)
