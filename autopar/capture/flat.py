"""The flat graph: the forward as one list of nodes, before repeated layers are folded; and the helpers that rewrites are made
of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Value, ancestors, size_argument, with_operands


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or buffer, with its fully qualified name in the model."""

    value: Value
    name: str
    trainable: bool
    buffer: bool


@dataclass(frozen=True, slots=True)
class FlatGraph:
    """The whole forward. `updates` are (buffer's name in the model, value name), `outputs` (``path:kind``, value
    name) of what is returned beside the loss. `Node.module` is the absolute module path here."""

    inputs: tuple[Value, ...]
    state_tensors: tuple[StateTensor, ...]
    nodes: tuple[Node, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The values that are read at the end: the loss, outputs, new values of buffers."""
        return (self.loss, *(name for _, name in self.outputs), *(name for _, name in self.updates))

    def values(self) -> dict[str, Value]:
        out = {value.name: value for value in self.inputs}
        out.update((source.value.name, source.value) for source in self.state_tensors)
        out.update((value.name, value) for node in self.nodes for value in node.outputs)
        return out

    def producers(self) -> dict[str, Node]:
        return {value.name: node for node in self.nodes for value in node.outputs}

    def uses(self) -> dict[str, int]:
        """The number of operands that read each value; `results` count too."""
        counts: dict[str, int] = {}
        for name in (*(name for node in self.nodes for name in node.operands()), *self.results):
            counts[name] = counts.get(name, 0) + 1
        return counts


def rename_operands(node: Node, names: Mapping[str, str]) -> Node:
    """A node with the values of its operands renamed."""
    operands = node.operands()
    return node if names.keys().isdisjoint(operands) else with_operands(node, [names.get(name, name) for name in operands])


Rewritten = Node | tuple[tuple[Node, ...], Mapping[str, str]]
"""A node in the place of another one; or nodes, and by old results the values that replace them."""


def rewritten(nodes: Iterable[Node], step: Callable[[Node], Rewritten | None]) -> tuple[tuple[Node, ...], Mapping[str, str]]:
    """Apply `step` to each of these nodes, in order; None keeps it."""
    names: dict[str, str] = {}
    out: list[Node] = []
    for original in nodes:
        node = rename_operands(original, names)
        result = step(node) or node
        new, aliases = ((result,), {}) if isinstance(result, Node) else result
        out.extend(new)
        names.update((old, names.get(new_name, new_name)) for old, new_name in aliases.items())
    return tuple(out), names


def rewrite_nodes(flat: FlatGraph, step: Callable[[Node], Rewritten | None]) -> FlatGraph:
    """The graph with `step` applied to each node, in order; None keeps the node."""
    nodes, names = rewritten(flat.nodes, step)
    loss = names.get(flat.loss, flat.loss)
    updates = tuple((buffer, names.get(name, name)) for buffer, name in flat.updates)
    outputs = tuple((path, names.get(name, name)) for path, name in flat.outputs)
    return replace(flat, nodes=nodes, loss=loss, updates=updates, outputs=outputs)


class Lookup:
    """The values, producers and uses of a graph before a rewrite, each made when it is first read."""

    def __init__(self, flat: FlatGraph) -> None:
        self._flat = flat

    @cached_property
    def values(self) -> dict[str, Value]:
        return self._flat.values()

    @cached_property
    def producers(self) -> dict[str, Node]:
        return self._flat.producers()

    @cached_property
    def uses(self) -> dict[str, int]:
        return self._flat.uses()


def node_rewrite(step: Callable[[Node, Lookup], Rewritten | None]) -> Callable[[FlatGraph], FlatGraph]:
    """The rewrite of a whole graph, of one that says what becomes of a node."""

    @wraps(step)
    def rewrite(flat: FlatGraph) -> FlatGraph:
        graph = Lookup(flat)
        return rewrite_nodes(flat, lambda node: step(node, graph))

    return rewrite


def drop_dead(flat: FlatGraph) -> FlatGraph:
    """The graph without nodes, parameters and buffers that nothing reads."""
    nodes = ancestors(flat.nodes, flat.results)
    live = {*flat.results, *(name for node in nodes for name in node.operands())}
    written = {buffer for buffer, _ in flat.updates}  # also one whose old value nobody reads
    state_tensors = tuple(source for source in flat.state_tensors if source.value.name in live or source.name in written)
    return replace(flat, nodes=tuple(nodes), state_tensors=state_tensors)


def size_args(shape: Iterable[Dim]) -> tuple[Arg, ...]:
    """A shape as a tuple of arguments."""
    return tuple(map(size_argument, shape))


def node_like(
    node: Node, op: str, args: tuple[Arg, ...], name: str, shape: Shape, dtype: str | None = None, flows: bool | None = None
) -> Node:
    """A node with one result, and the module, source and grad mode of `node`."""
    value = Value(name, shape, dtype or node.outputs[0].dtype, node.outputs[0].differentiable if flows is None else flows)
    return Node(op=op, args=args, kwargs=(), outputs=(value,), module=node.module, source=node.source, no_grad=node.no_grad)
