"""Makes each placement conversion of the plan a node, `ap.convert`.

Before (`y` reads x gathered over tp, and the plan has the conversion ``%x: R S(1) -> R R``)::

    %y = aten.linear(%x, %w)

After: the conversion stands before its first use, and later uses share its result::

    %x_full = ap.convert(%x, axis='tp', conversion='S(1) -> R')
    %y = aten.linear(%x_full, %w)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.ir.graph import Node, Value, with_operands
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.placement import Partial, Placements, Replicate, Shard, format_placements, local_parts
from autopar.passes.base import BlockState, Context, convert_node, fresh_name, only_gradient_changes
from autopar.rules.conversions import axis_conversion, changed_axis

NAME_SUFFIXES = {
    "all_gather": "full",
    "all_reduce": "sum",
    "reduce_scatter": "scattered",
    "all_to_all": "exchanged",
    "slice": "shard",
    "mask": "masked",
    "pad": "padded",
    None: "replicated",
}
"""The names of results, by what the forward of a conversion does."""


def conversion_text(source: Placements, target: Placements, mesh: Mesh, axis: int) -> str:
    """Return ``S(1) -> R`` on one axis, as local tensors see it: `parts` counts only what the other axes left."""

    def local(placements: Placements) -> str:
        place = placements[axis]
        return str(replace(place, parts=local_parts(placements, mesh.sizes, axis)) if isinstance(place, Shard) else place)

    return f"{local(source)} -> {local(target)}"


@dataclass(slots=True)
class _ConversionInserter:
    """The rewritten block so far: its nodes, and each value in each placement that it has already.

    `sources` is the plan: for a value in a placement, the placement that it is converted from.
    """

    mesh: Mesh
    sources: dict[tuple[str, Placements], Placements]
    taken: set[str]
    micro_batches: int
    nodes: list[Node] = field(default_factory=list)
    known: dict[tuple[str, Placements], Value] = field(default_factory=dict)
    placements: dict[str, Placements] = field(default_factory=dict)
    roots: dict[str, Value] = field(default_factory=dict)

    def produce(self, value: Value, placements: Placements) -> None:
        self.known[value.name, placements] = self.roots[value.name] = value
        self.placements[value.name] = placements

    def need(self, name: str, placements: Placements, like: Node | None) -> str:
        """Return the name of the value in this placement; the conversions that lead there are inserted now unless they exist."""
        value = self.known.get((name, placements))
        if value is None:
            source = self.sources.get((name, placements))
            if source is None:
                raise PlanError(f"the plan has no conversion of {name} to {format_placements(placements)}; plan the model again")
            before = self.roots[name]
            before = replace(before, name=self.need(name, source, like))
            value = self._convert(name, before, source, placements, like)
            self.known[name, placements] = value
        return value.name

    def _convert(self, root: str, before: Value, source: Placements, target: Placements, like: Node | None) -> Value:
        axis = changed_axis(source, target)
        adds = source[axis] == Replicate() and target[axis] == Partial()
        shares = self.micro_batches if adds and self.mesh.names[axis] == DATA_AXIS else 1
        if self.mesh.sizes[axis] == shares == 1:
            return before
        conversion = axis_conversion(source[axis], target[axis], before.differentiable)
        if conversion is None:
            if before.differentiable or not only_gradient_changes(source[axis], target[axis]):
                raise PlanError(
                    f"{root} cannot be converted from {source[axis]} to {target[axis]} in one step; plan the model again"
                )
            return before
        name = fresh_name(f"{root}_{NAME_SUFFIXES.get(conversion.forward, conversion.forward)}", self.taken)
        node = convert_node(before, name, self.mesh.names[axis], conversion_text(source, target, self.mesh, axis), like)
        if shares > 1:
            node = replace(node, kwargs=(*node.kwargs, ("micro_batches", shares)))
        self.nodes.append(node)
        self.placements[name] = target
        return node.outputs[0]


@dataclass(frozen=True, slots=True)
class InsertConversions:
    """Inserts the conversions that operands, outputs and buffer updates need."""

    name: str = "insert_conversions"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block, plan = state.block, context.plan
        sources = {(each.value, each.target): each.source for each in plan.conversions}
        inserter = _ConversionInserter(context.mesh, sources, set(block.values()), context.micro_batches)
        for value, placements in zip(block.inputs, plan.inputs, strict=True):
            inserter.produce(value, placements)
        for parameter, placements in zip(block.parameters, plan.parameters, strict=True):
            inserter.produce(parameter.value, placements)
        plans = {each.node: each for each in plan.nodes}
        for node in block.nodes:
            each = plans[node.name]
            pairs = zip(node.operands(), each.operands, strict=True)
            inserter.nodes.append(with_operands(node, [inserter.need(name, where, node) for name, where in pairs]))
            for value, where in zip(node.outputs, each.results, strict=True):
                inserter.produce(value, where)
        outputs = [inserter.need(name, where, None) for name, where in zip(block.outputs, plan.outputs, strict=True)]
        updates = [(buffer, self._updated(inserter, buffer, value)) for buffer, value in block.updates]
        changed = replace(block, nodes=tuple(inserter.nodes), outputs=tuple(outputs), updates=tuple(updates))
        return replace(state, block=changed, placements=inserter.placements)

    @staticmethod
    def _updated(inserter: _ConversionInserter, buffer: str, value: str) -> str:
        """Return a buffer's new value in the buffer's placement; without the plan's conversion, axis by axis, the innermost
        first."""
        target, where = inserter.placements[buffer], inserter.placements[value]
        for axis in reversed(range(len(target))):
            if not only_gradient_changes(where[axis], target[axis]) and where[axis] != target[axis]:
                after = (*where[:axis], target[axis], *where[axis + 1 :])
                inserter.sources.setdefault((value, after), where)
                where = after
        return inserter.need(value, where, None)
