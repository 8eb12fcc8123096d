"""The nodes of a traced layer, and their copies for layers that are equal to it.

Chains of opaque layers are joined into one node each, so that the time of the decompositions does not grow with depth. Two
neighbours join where the later one reads all results of the earlier one, at the same arguments as that one read its
predecessor's, nothing else reads them, and all other arguments are equal. So a chain is ``x -> f(x, y) -> f(f(x, y), y) ...``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx
from torch.export import ExportedProgram

from autopar.capture.flat import FlatGraph, StateTensor, rename_operands
from autopar.capture.tracing.equal_layers import NAMESPACE, CannotOutline
from autopar.ir.graph import Node, Value


@dataclass(slots=True)
class LayerSpan:
    """The nodes of a traced layer; `inputs` and `outputs` are the values at its borders."""

    path: str
    inputs: tuple[str, ...]
    start: int
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()
    copies: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    """The path of each copy, and the names of its values by those of this layer."""

    def inside(self) -> set[str]:
        return {value.name for node in self.nodes for value in node.outputs}

    def check_inside(self, sources: Mapping[str, StateTensor]) -> None:
        """CannotOutline where it reads more than its arguments and its own parameters."""
        own = {source.value.name for name, source in sources.items() if name.startswith(f"{self.path}.")}
        known = self.inside() | own | set(self.inputs)
        foreign = [name for node in self.nodes for name in node.operands() if name not in known]
        if foreign:
            raise CannotOutline(f"{self.path} reads {foreign[0]}, which is not among its arguments")

    def check_outside(self, flat: FlatGraph) -> None:
        """CannotOutline where other nodes read more of it than its results, or where its buffers take values from outside."""
        hidden = self.inside() - set(self.outputs)
        own = {id(node) for node in self.nodes}
        read = {name for node in flat.nodes if id(node) not in own for name in node.operands()} | {
            flat.loss,
            *(name for _, name in flat.outputs),
        }
        written = {value for name, value in flat.updates if name.startswith(f"{self.path}.")}
        others = {value for name, value in flat.updates if not name.startswith(f"{self.path}.")}
        if hidden & (read | others) or written - self.inside():
            raise CannotOutline(f"{self.path} hands out or writes more than its result")

    def copied_updates(self, updates: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Yield what the copies write to their buffers, of `updates`, what this layer and others write."""
        for path, names in self.copies:
            for name, value in updates:
                if name.startswith(f"{self.path}."):
                    yield path + name[len(self.path) :], names[value]

    def copy(
        self, path: str, inputs: tuple[str, ...], values: Mapping[str, Value], sources: Mapping[str, StateTensor]
    ) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[StateTensor, ...]]:
        """A copy for the layer at `path`: its nodes, its results, and its parameters (an opaque layer is traced without them)."""
        for mine, given in zip(self.inputs, inputs, strict=True):
            if replace(values[mine], name="") != replace(values[given], name=""):
                raise CannotOutline(f"{path} is called with {values[given]}, not with {values[mine]}")
        names = dict(zip(self.inputs, inputs, strict=True))
        nodes: list[Node] = []
        own: list[StateTensor] = []
        suffix = path.replace(".", "_")
        for name, source in sources.items():
            if name.startswith(f"{self.path}."):
                value = replace(source.value, name=f"{source.value.name}_of_{suffix}")
                own.append(replace(source, value=value, name=path + name[len(self.path) :]))
                names[source.value.name] = value.name
        for node in self.nodes:
            outputs = tuple(replace(value, name=f"{value.name}_of_{suffix}") for value in node.outputs)
            module = path + node.module[len(self.path) :] if node.module.startswith(self.path) else node.module
            nodes.append(replace(rename_operands(node, names), outputs=outputs, module=module))
            names.update((old.name, new.name) for old, new in zip(node.outputs, outputs, strict=True))
        self.copies.append((path, names))
        return tuple(nodes), tuple(names[name] for name in self.outputs), tuple(own)


Fed = dict[int, int]
"""The arguments of a layer that are results of the layer before, each with its index there."""


def join_layers(program: ExportedProgram) -> None:
    """Rewrites the program's graph in place. A joined node's key is ``first path,path,... argument=result,...``."""
    graph = program.graph_module.graph
    changed = False
    for node in list(graph.nodes):
        if not _opaque(node) or node.users == {}:
            continue
        feeding, last, paths = None, node, [_key(node)[1]]
        while (found := _next(last, node, feeding)) is not None:
            last, feeding = found
            paths.append(_key(last)[1])
        if feeding is None:
            continue
        changed = True
        fed = ",".join(f"{argument}={result}" for argument, result in sorted(feeding.items()))
        node.args = (*node.args[:-1], f"{_key(node)[0]} {','.join(paths)} {fed}")
        _bypass(graph, node, last)
    if changed:
        program.graph_module.recompile()


def _opaque(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith(f"{NAMESPACE}.outlined") and len(_key(node)) == 2


def _key(node: fx.Node) -> list[str]:
    return str(node.args[-1]).split(" ")


def _next(node: fx.Node, first: fx.Node, feeding: Fed | None) -> tuple[fx.Node, Fed] | None:
    """The layer that reads all results of `node`, and at which arguments; None where no equal layer does."""
    readers = {reader for item in node.users for reader in item.users}
    if len(readers) != 1 or any(item.target is not operator.getitem for item in node.users):
        return None
    (after,) = readers
    if not _opaque(after) or _key(after)[0] != _key(node)[0]:
        return None
    given, before = list(after.args[0]), list(first.args[0])  # type: ignore[arg-type]
    found: Fed = {}
    for argument, (item, earlier) in enumerate(zip(given, before, strict=True)):
        if isinstance(item, fx.Node) and item.target is operator.getitem and item.args[0] is node:
            found[argument] = int(item.args[1])  # type: ignore[arg-type]
        elif item is not earlier:
            return None
    return (after, found) if found and feeding in (None, found) else None


def _bypass(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    """Replaces the results of `last` by those of `first`, and erases the nodes between them."""
    between: list[fx.Node] = []
    node = first
    while node is not last:
        items = list(node.users)
        (node,) = {reader for item in items for reader in item.users}
        between += [*items, node]
    last.replace_all_uses_with(first)
    for item in reversed(between):
        graph.erase_node(item)
