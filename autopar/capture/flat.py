"""The forward as one flat list of nodes, before it is folded into blocks, and the few helpers that rewrites are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Ref, Symbol, Value


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter or buffer under its original name."""

    value: Value
    name: str
    trainable: bool
    buffer: bool


@dataclass(frozen=True, slots=True)
class Flat:
    """`updates` are (buffer's original name, value name), `outputs` (path in the model's result, value name) of what is returned
    beside the loss. Node.module is the absolute module path here."""

    inputs: tuple[Value, ...]
    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]
    loss: str
    updates: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """Values that are read at the end: the loss, outputs, new values of buffers."""
        return (self.loss, *(name for _, name in self.outputs), *(name for _, name in self.updates))

    def values(self) -> dict[str, Value]:
        out = {value.name: value for value in self.inputs}
        out.update((source.value.name, source.value) for source in self.sources)
        out.update((value.name, value) for node in self.nodes for value in node.outputs)
        return out

    def producers(self) -> dict[str, Node]:
        return {value.name: node for node in self.nodes for value in node.outputs}

    def uses(self) -> dict[str, int]:
        """How many operands read each value; `results` count too."""
        counts: dict[str, int] = {}
        for name in (*(name for node in self.nodes for name in node.operands()), *self.results):
            counts[name] = counts.get(name, 0) + 1
        return counts


def substitute(arg: Arg, names: Mapping[str, str]) -> Arg:
    """The argument with values renamed."""
    if isinstance(arg, Ref):
        return Ref(names.get(arg.name, arg.name))
    if isinstance(arg, tuple):
        return tuple(substitute(item, names) for item in arg)
    return arg


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """The node reading other values."""
    if not names:
        return node
    args = tuple(substitute(arg, names) for arg in node.args)
    return replace(node, args=args, kwargs=tuple((key, substitute(arg, names)) for key, arg in node.kwargs))


Rewrite = Callable[[Node], "tuple[tuple[Node, ...], Mapping[str, str]] | None"]


def rewrite_nodes(flat: Flat, step: Rewrite) -> Flat:
    """Runs `step` on each node in order. It returns None (keep), or new nodes and a map from the old results to values."""
    names: dict[str, str] = {}
    nodes: list[Node] = []
    for original in flat.nodes:
        node = rename(original, names)
        result = step(node)
        if result is None:
            nodes.append(node)
            continue
        new, aliases = result
        nodes.extend(new)
        names.update((old, names.get(new_name, new_name)) for old, new_name in aliases.items())
    loss = names.get(flat.loss, flat.loss)
    updates = tuple((buffer, names.get(name, name)) for buffer, name in flat.updates)
    outputs = tuple((path, names.get(name, name)) for path, name in flat.outputs)
    return replace(flat, nodes=tuple(nodes), loss=loss, updates=updates, outputs=outputs)


def drop_dead(flat: Flat) -> Flat:
    """Without nodes whose results nobody reads, nor unread sources."""
    live = set(flat.results)
    nodes: list[Node] = []
    for node in reversed(flat.nodes):
        if any(value.name in live for value in node.outputs):
            nodes.append(node)
            live.update(node.operands())
    written = {buffer for buffer, _ in flat.updates}  # also one whose old value nobody reads
    sources = tuple(source for source in flat.sources if source.value.name in live or source.name in written)
    return replace(flat, nodes=tuple(reversed(nodes)), sources=sources)


def size_args(shape: Iterable[Dim]) -> tuple[Arg, ...]:
    """A shape as an argument."""
    return tuple(Symbol(dim) if isinstance(dim, str) else dim for dim in shape)


def like(
    node: Node, op: str, args: tuple[Arg, ...], name: str, shape: Shape, dtype: str | None = None, flows: bool | None = None
) -> Node:
    """A node at the place of `node` (same module, source, grad mode) with one result."""
    value = Value(name, shape, dtype or node.outputs[0].dtype, node.outputs[0].differentiable if flows is None else flows)
    return Node(op, args, (), (value,), node.module, node.source, node.no_grad)
