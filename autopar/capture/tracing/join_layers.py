"""Joins chains of opaque layers into one node each, so that the time of the decompositions does not grow with depth.

Two neighbours join where the later one reads all results of the earlier one, at the same arguments as that one read its
predecessor's, nothing else reads them, and all other arguments are equal. So a chain is ``x -> f(x, y) -> f(f(x, y), y) ...``.
"""

from __future__ import annotations

import operator

from torch import fx
from torch.export import ExportedProgram

from autopar.capture.tracing.equal_layers import NAMESPACE

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
