"""Arcs become `ap.convert` nodes.

Before (`y` is needed gathered on tp, the plan has the arc ``%x: R S(1) -> R R``)::

    %y = aten.linear(%x, %w)

After: the conversion stands before its first use and serves all later ones::

    %x_full = ap.convert(%x, axis='tp', move='S(1) -> R')
    %y = aten.linear(%x_full, %w)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.ir.graph import Node, Value
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Shard, format_placements, local_parts
from autopar.passes.base import Context, Stage, convert_node, equal_copies, fresh, with_operands
from autopar.rules.conversions import changed_axis, conversion

SUFFIXES = {
    "all_gather": "full",
    "all_reduce": "sum",
    "reduce_scatter": "scattered",
    "all_to_all": "swapped",
    "slice": "mine",
    "mask": "once",
    "pad": "padded",
    None: "shared",
}


def move_text(source: Placements, target: Placements, mesh: Mesh, axis: int) -> str:
    """``S(1) -> R`` as the local tensors see it: `parts` count what the other axes left."""

    def local(placements: Placements) -> str:
        mine = placements[axis]
        return str(replace(mine, parts=local_parts(placements, mesh.sizes, axis)) if isinstance(mine, Shard) else mine)

    return f"{local(source)} -> {local(target)}"


@dataclass(slots=True)
class _Writer:
    """The block as it grows: nodes so far, and the name of each value in each placement."""

    mesh: Mesh
    sources: dict[tuple[str, Placements], Placements]
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)
    known: dict[tuple[str, Placements], Value] = field(default_factory=dict)
    placements: dict[str, Placements] = field(default_factory=dict)
    roots: dict[str, Value] = field(default_factory=dict)

    def produce(self, value: Value, placements: Placements) -> None:
        self.known[value.name, placements] = self.roots[value.name] = value
        self.placements[value.name] = placements

    def need(self, name: str, placements: Placements, like: Node | None) -> str:
        """The name of the value in this placement; what leads there is written now."""
        found = self.known.get((name, placements))
        if found is None:
            source = self.sources.get((name, placements))
            if source is None:
                raise PlanError(f"no arc of the plan brings {name} to {format_placements(placements)}; plan the model again")
            before = self.roots[name]
            before = replace(before, name=self.need(name, source, like))
            found = self._convert(name, before, source, placements, like)
            self.known[name, placements] = found
        return found.name

    def _convert(self, root: str, before: Value, source: Placements, target: Placements, like: Node | None) -> Value:
        axis = changed_axis(source, target)
        if self.mesh.sizes[axis] == 1:
            return before
        move = conversion(source[axis], target[axis], before.differentiable)
        if move is None:
            if before.differentiable or not equal_copies(source[axis], target[axis]):
                raise PlanError(f"{root} cannot go from {source[axis]} to {target[axis]} in one step; plan the model again")
            return before
        name = fresh(f"{root}_{SUFFIXES.get(move.forward, move.forward)}", self.taken)
        node = convert_node(before, name, self.mesh.names[axis], move_text(source, target, self.mesh, axis), like)
        self.nodes.append(node)
        self.placements[name] = target
        return node.outputs[0]


@dataclass(frozen=True, slots=True)
class InsertConversions:
    """Makes every placement change of the plan a node."""

    name: str = "insert_conversions"

    def run(self, stage: Stage, context: Context) -> Stage:
        block, plan = stage.block, context.plan
        sources = {(arc.value, arc.target): arc.source for arc in plan.arcs}
        writer = _Writer(context.mesh, sources, set(block.values()))
        for value, placements in zip(block.inputs, plan.inputs, strict=True):
            writer.produce(value, placements)
        for parameter, placements in zip(block.parameters, plan.parameters, strict=True):
            writer.produce(parameter.value, placements)
        plans = {each.node: each for each in plan.nodes}
        for node in block.nodes:
            each = plans[node.name]
            pairs = zip(node.operands(), each.operands, strict=True)
            writer.nodes.append(with_operands(node, [writer.need(name, where, node) for name, where in pairs]))
            for value, where in zip(node.outputs, each.results, strict=True):
                writer.produce(value, where)
        outputs = [writer.need(name, where, None) for name, where in zip(block.outputs, plan.outputs, strict=True)]
        updates = [(buffer, self._updated(writer, buffer, value)) for buffer, value in block.updates]
        changed = replace(block, nodes=tuple(writer.nodes), outputs=tuple(outputs), updates=tuple(updates))
        return replace(stage, block=changed, placements=writer.placements)

    @staticmethod
    def _updated(writer: _Writer, buffer: str, value: str) -> str:
        """A buffer's new value, where the buffer is. What the plan says nothing of goes there axis by axis, innermost first."""
        target, where = writer.placements[buffer], writer.placements[value]
        for axis in reversed(range(len(target))):
            if not equal_copies(where[axis], target[axis]) and where[axis] != target[axis]:
                after = (*where[:axis], target[axis], *where[axis + 1 :])
                writer.sources.setdefault((value, after), where)
                where = after
        return writer.need(value, where, None)
