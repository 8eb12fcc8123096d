"""Placements that a user pins (``constrain``): checked as they are written, looked up in a graph, and held against a plan.

A pinned value has its placement where it is made and between blocks; where an operation leaves partial sums of it, these are
reduced to that placement before anything reads them. A parameter is stored in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError, PlanError
from autopar.ir.graph import Block, Graph, Node, Value
from autopar.ir.mesh import EXPERT_AXIS, MODEL_AXES, Mesh
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard, parse_placement
from autopar.ir.plan import BlockPlan, Candidate
from autopar.solve.problem.pin_names import named_values

Constraints = Mapping[str, Mapping[str, str]]
"""Name of a parameter, module, source line or value (``model.layers.*.mlp.up_proj.weight``) -> by mesh axis the placement."""

PINNED_AXES = (*MODEL_AXES, EXPERT_AXIS)


@dataclass(frozen=True, slots=True)
class Pin:
    """The placement of a value on one mesh axis, and the name that it was asked for by."""

    name: str
    axis: str
    place: Placement

    def allows(self, place: Placement) -> bool:
        """Return whether a placement is the pinned one. ``R`` is equal values on all ranks, whatever their gradients."""
        return place == self.place or (self.place == Replicate() and place == Invariant())

    def allows_making(self, place: Placement) -> bool:
        """Return whether an operation may make the value there: partial sums are reduced to the pinned placement."""
        return self.allows(place) or (isinstance(place, Partial) and not isinstance(self.place, Partial))

    def allows_reading(self, place: Placement) -> bool:
        """Return whether an operation may read the value there: anywhere but in the partial sums that it was made of."""
        return not isinstance(place, Partial) or isinstance(self.place, Partial)

    @property
    def needs_axis(self) -> bool:
        """Whether a mesh without the axis cannot obey: a value is whole on an axis that is not there."""
        return isinstance(self.place, Shard | Partial)

    def __str__(self) -> str:
        return f"{self.name}: {self.axis}={self.place}"


Pins = Mapping[tuple[str, str], tuple[Pin, ...]]
"""(Block, value) -> its pins, at most one an axis."""


# -- as they are written


def parse_constraints(constrain: Any) -> dict[str, dict[str, str]]:
    """Return the constraints with each placement in its one spelling. AutoparError for what is none."""
    if constrain is None:
        return {}
    if not isinstance(constrain, Mapping):
        raise AutoparError(f'constrain={repr(constrain)[:60]} pins nothing: write {{"lm_head": {{"tp": "R"}}}}')
    out: dict[str, dict[str, str]] = {}
    for name, places in constrain.items():
        if not (isinstance(name, str) and name and name.isprintable() and len(name) <= _LONGEST):
            raise AutoparError(f"constrain: {repr(name)[:60]} is no name: write that of a parameter, a module or file.py:line")
        if not isinstance(places, Mapping) or not places:
            raise AutoparError(f'constrain {name}: write the placement by mesh axis, as {{"tp": "S(0)"}}')
        out[name] = {str(axis): _checked(name, str(axis), place) for axis, place in places.items()}
    return out


_LONGEST = 300


def _checked(name: str, axis: str, place: object) -> str:
    """The one spelling of a placement, which may be one of DTensor's."""
    if axis not in PINNED_AXES:
        raise AutoparError(
            f"constrain {name}: placements are chosen on {', '.join(PINNED_AXES)}, not on {axis[:40]!r} (dp shards the batch of "
            "all values and, by force=zero=3, their state; pp cuts the model into stages)"
        )
    try:
        return str(parse_placement(str(place).replace(" ", "")))
    except ValueError as error:
        raise AutoparError(f"constrain {name}: {axis}={str(place)[:40]}: {error}") from None


_AXIS = re.compile(r",(?![^(]*\))")
"""A comma outside of the parentheses of ``S(0,3)``."""


def parse_constraint(text: str) -> tuple[str, dict[str, str]]:
    """Parse ``model.layers.*.mlp.up_proj.weight:tp=S(0),tp2=R``, or ``net.py:12:tp=R``."""
    name, colon, rest = text.rpartition(":")
    pairs = [pair.partition("=")[::2] for pair in _AXIS.split(rest)]
    if not (name and colon and all(axis and place for axis, place in pairs)):
        raise AutoparError(f"constrain {text[:80]!r}: write NAME:AXIS=PLACEMENT, as 'lm_head:tp=R' or 'layers.*.up:tp=S(2)'")
    return name, parse_constraints({name: dict(pairs)})[name]


def constraint_texts(constraints: Constraints) -> list[str]:
    """``lm_head: tp=R``, a text for each name."""
    return [f"{name}: " + ", ".join(f"{axis}={place}" for axis, place in places.items()) for name, places in constraints.items()]


# -- in a graph


def pins_of(graph: Graph, constraints: Constraints) -> Pins:
    """Return the pins of the values that the constraints name. PlanError for a name that nothing has, a placement that the value
    cannot have on any mesh, and two that contradict each other."""
    out: dict[tuple[str, str], tuple[Pin, ...]] = {}
    blocks = {block.name: block for block in graph.blocks}
    for name, places in constraints.items():
        for key in named_values(graph, name):
            value = blocks[key[0]].values()[key[1]]
            for axis, text in places.items():
                pin = Pin(name, axis, _of_value(name, axis, parse_placement(text), value))
                other = next((each for each in out.get(key, ()) if each.axis == axis), None)
                if other is None:
                    out[key] = (*out.get(key, ()), pin)
                elif other.place != pin.place:
                    raise PlanError(f"constrain {other} and {pin} contradict each other: both pin {key[1]} of {key[0]}")
    return out


def _of_value(name: str, axis: str, place: Placement, value: Value) -> Placement:
    """The placement with its dimension counted from the first."""
    rank = len(value.shape)
    if isinstance(place, Shard):
        if not -rank <= place.dim < rank:
            shape = ", ".join(map(str, value.shape))
            has = f"{value.name} has the {rank} dimensions [{shape}]"
            raise PlanError(f"constrain {name}: {axis}={place}: {has}: write one of them")
        return Shard(place.dim % rank, place.parts)
    if place == Invariant() and not value.differentiable:
        raise PlanError(f"constrain {name}: {axis}=I: {value.name} takes no gradient, so there is none to be equal: write R")
    return place


# -- on a mesh


def why_no_axis(pins: Pins, mesh: Mesh) -> str:
    """Say which pin needs an axis that the mesh has not; empty where there is none."""
    missing = (pin for each in pins.values() for pin in each if pin.needs_axis and pin.axis not in mesh.names)
    return next((f"constrain {pin}: {mesh} has no axis {pin.axis}: leave its degree open, or the pin out" for pin in missing), "")


def why_impossible(
    pins: Iterable[tuple[Pin, Value]], mesh: Mesh, offered: Callable[[Pin, Value], Collection[Placement]], maker: str
) -> str:
    """Say why no choice of `maker` (an operation, a parameter) suits the pins of its values. `offered`: the placements of a value
    on the pin's axis that there are without pins."""
    every = [(pin, value) for pin, value in pins if pin.axis in mesh.names]
    for pin, value in every:
        size, places = mesh.size_of(pin.axis), dict.fromkeys(offered(pin, value))
        if any(map(pin.allows_making, places)):
            continue
        if isinstance(pin.place, Shard) and not can_shard(value.shape, (pin.place,), (size,)):
            shape = ", ".join(map(str, value.shape))
            whole = pin.place.dim if pin.place.parts == 1 else f"{pin.place.dim} in {pin.place.parts} parts"
            return f"constrain {pin}: dimension {whole} of [{shape}] does not divide by {pin.axis}={size}"
        allowed = ", ".join(map(str, places))
        return f"constrain {pin}: {maker} can have {allowed} on {pin.axis}={size}, and nothing else"
    texts = list(dict.fromkeys(str(pin) for pin, _ in every))
    if len(texts) == 1:
        return f"constrain {texts[0]}: {maker} cannot have it on {mesh}, whose other axes shard it too"
    return f"constrain {' and '.join(texts)}: {maker} can have each of them on {mesh}, but not together"


def operation_text(block: Block, node: Node, shapes: str = "") -> str:
    """``aten.linear at mlp.up of Layer (net.py:12)``, with its `shapes` after the name."""
    place = f"{node.module} of {block.name}" if node.module else block.name
    what = " ".join(filter(None, (node.op.removesuffix(".default"), shapes)))
    return f"{what} at {place}" + (f" ({node.source})" if node.source else "")


# -- in a plan


def why_disobeyed_pins(graph: Graph, candidate: Candidate, constraints: Constraints) -> str:
    """Say which pinned value a plan has elsewhere; empty where it obeys. PlanError as `pins_of`."""
    for (name, value), pins in pins_of(graph, constraints).items():
        block, plan = graph.block(name), candidate.block(name)
        for pin in pins:
            if pin.axis not in candidate.mesh.names:
                if pin.needs_axis:
                    return f"{pin}: {candidate.mesh} has no axis {pin.axis}"
                continue
            axis = candidate.mesh.index(pin.axis)
            for at in _placements(block, plan, value, pin, axis):
                if not pin.allows(at[axis]):
                    return f"{pin}: it is {at[axis]} there"
    return ""


def _placements(block: Block, plan: BlockPlan, value: str, pin: Pin, axis: int) -> Iterator[Placements]:
    """Yield the placements of a value that have to be the pinned one: between blocks, as it is stored, as it is made; of partial
    sums what they are reduced to, and themselves where they are read."""
    names = [each.name for each in block.inputs], [each.value.name for each in block.parameters], block.outputs
    for each, placements in zip(names, (plan.inputs, plan.parameters, plan.outputs), strict=True):
        yield from (at for name, at in zip(each, placements, strict=True) if name == value)
    nodes = {node.name: node for node in block.nodes}
    for chosen in plan.nodes:
        made = zip(nodes[chosen.node].outputs, chosen.results, strict=True)
        yield from (at for output, at in made if output.name == value and not pin.allows_making(at[axis]))
        read = zip(nodes[chosen.node].operands(), chosen.operands, strict=True)
        yield from (at for name, at in read if name == value and isinstance(at[axis], Partial))
    for change in () if isinstance(pin.place, Partial) else plan.conversions:
        if change.value == value and isinstance(change.source[axis], Partial) and not isinstance(change.target[axis], Partial):
            yield change.target
