"""Rewrites writes into slices of a tensor: ``copy`` becomes its source, and a tensor that is filled slice by slice a ``cat``."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rename_operands, rewrite_nodes, size_args
from autopar.ir.dims import Dim
from autopar.ir.graph import DType, Node, Ref
from autopar.operations.pointwise import CLONE
from autopar.operations.table import operation

_COMPLEX = ("complex64", "complex128")
WrittenSlice = tuple[int, int, str]
"""Start and end of a slice, and the value that was written there."""


@node_rewrite
def copies(node: Node, graph: Lookup) -> Rewritten | None:
    """``copy(x, y)`` is y, of x's type and shape."""
    values = graph.values
    if node.op != "aten.copy":
        return None
    source, result = values[node.operands()[-1]], node.outputs[0]
    nodes: list[Node] = []
    if source.dtype != result.dtype:
        cast = node_like(node, "aten.to.dtype", (Ref(source.name), DType(result.dtype)), f"{node.name}_cast", source.shape)
        nodes, source = [cast], cast.outputs[0]
    if source.shape != result.shape:
        grown = node_like(node, "aten.expand", (Ref(source.name), size_args(result.shape)), f"{node.name}_grown", result.shape)
        nodes, source = [*nodes, grown], grown.outputs[0]
    return tuple(nodes), {result.name: source.name}


def _joined(node: Node, base: Ref, part: Ref, dim: int, written: tuple[int, int]) -> Rewritten:
    """``slice_scatter``, which has no gradient of complex numbers, as ``cat(x[:a], part, x[b:])``."""
    begin, end = written
    shape = node.outputs[0].shape
    size = shape[dim]
    assert isinstance(size, int)
    nodes: list[Node] = []
    parts: list[Ref] = []
    for suffix, (start, stop) in (("before", (0, begin)), ("written", written), ("after", (end, size))):
        if start < stop and suffix != "written":
            rest = (*shape[:dim], stop - start, *shape[dim + 1 :])
            nodes.append(node_like(node, "aten.slice.Tensor", (base, dim, start, stop), f"{node.name}_{suffix}", rest))
            parts.append(Ref(nodes[-1].name))
        elif start < stop:
            parts.append(part)
    return (*nodes, replace(node, op="aten.cat", args=(tuple(parts), dim), kwargs=())), {}


def filled(flat: FlatGraph) -> FlatGraph:
    """``slice_scatter(slice_scatter(x, a, d, 0, 8), b, d, 8, 16)``, which leaves nothing of x, is ``cat(a, b, d)``; where a
    part is the whole, that is left."""
    values = flat.values()
    written: dict[str, tuple[int, tuple[WrittenSlice, ...]]] = {}

    def step(node: Node) -> Rewritten | None:
        if node.op != "aten.slice_scatter":
            return None
        base, part, dim, start, end, stride = (*node.args, None, None, None)[:6] if len(node.args) < 6 else node.args
        assert isinstance(base, Ref) and isinstance(part, Ref)
        rank = len(node.outputs[0].shape)
        given = dict(node.kwargs)
        at = int(dim if dim is not None else given.get("dim", 0)) % rank  # type: ignore[arg-type]
        size: Dim = node.outputs[0].shape[at]
        begin = start if start is not None else given.get("start", 0) or 0
        length = values[part.name].shape[at]
        if begin == 0 and length == size:
            return (), {node.name: part.name}
        if (stride or given.get("step", 1)) != 1 or not all(isinstance(item, int) for item in (begin, length, size)):
            return None
        assert isinstance(begin, int) and isinstance(length, int) and isinstance(size, int)
        begin += size if begin < 0 else 0
        before = written.get(base.name)
        others = before[1] if before is not None and before[0] == at else ()
        slices = (*(each for each in others if each[1] <= begin or each[0] >= begin + length), (begin, begin + length, part.name))
        written[node.name] = at, slices
        ordered = sorted(slices)
        borders = [0, *(end for _, end, _ in ordered)]
        if [start for start, _, _ in ordered] != borders[:-1] or borders[-1] != size:
            return _joined(node, base, part, at, (begin, begin + length)) if node.outputs[0].dtype in _COMPLEX else None
        whole = replace(node, op="aten.cat", args=(tuple(Ref(name) for _, _, name in ordered), at), kwargs=())
        return whole

    return rewrite_nodes(flat, step)


def result_copies(flat: FlatGraph) -> FlatGraph:
    """An input, parameter or buffer that is an output (``return reconstruction, x``) is returned as a copy: operations make all
    outputs. That of a parameter or buffer is made where it is read first: on its stage of a pipeline, and before a write; inputs
    are on every stage."""
    graph = Lookup(flat)
    copies = {name: f"{name}_returned" for _, name in flat.outputs if name not in graph.producers}
    inputs = {value.name for value in flat.inputs}
    waiting = dict.fromkeys(copies)

    def copied(name: str, module: str) -> Node:
        del waiting[name]
        return Node(CLONE, (Ref(name),), (), (replace(graph.values[name], name=copies[name]),), module=module)

    def step(node: Node) -> Rewritten | None:
        read = [name for name in dict.fromkeys(node.operands()) if name in waiting and name not in inputs]
        return (*(copied(name, node.module) for name in read), node), {}

    flat = rewrite_nodes(flat, step) if copies else flat
    last = tuple(copied(name, "") for name in list(waiting))
    outputs = tuple((path, copies.get(name, name)) for path, name in flat.outputs)
    return replace(flat, nodes=(*flat.nodes, *last), outputs=outputs)


def buffers_as_they_were(flat: FlatGraph) -> FlatGraph:
    """Buffers that are written are copied where their old values are needed afterwards: by a backward (a queue of keys that the
    loss reads, a mask that it computes again), after the new value is made (``before = self.steps.clone(); self.steps += 1``,
    whose block may end before the read), by an output, and by another buffer (``self.before, self.now = self.now, y``). Each new
    value is the result of an operation (``self.last.copy_(x)``)."""
    places, renamed = _Old(flat).copies()
    values = flat.values()
    copies = {name: f"{name}_as_it_was" for name in places}  # nobody's buffer, where `queue_before` may be one
    modules = {name: buffer.rpartition(".")[0] for buffer, name in flat.updates}
    at_node: dict[int, list[str]] = {}
    for name, place in places.items():
        at_node.setdefault(place, []).append(name)
    nodes: list[Node] = []
    for index, node in enumerate((*flat.nodes, None)):
        for name in at_node.get(index, ()):
            value = replace(values[name], name=copies[name], differentiable=False)
            module = node.module if node is not None else modules.get(name, "")
            nodes.append(Node(CLONE, (Ref(name),), (), (value,), module=module))
        if node is not None:
            nodes.append(rename_operands(node, {name: copies[name] for name in renamed.get(index, ())}))
    last = {name: copies[name] for name in renamed.get(len(flat.nodes), ())}
    updates, outputs = (tuple((key, last.get(name, name)) for key, name in pairs) for pairs in (flat.updates, flat.outputs))
    return replace(flat, nodes=tuple(nodes), updates=updates, outputs=outputs)


class _Old:
    """The reads of old values that read copies. A copy is made no later than the new value, whose block writes the buffer."""

    def __init__(self, flat: FlatGraph) -> None:
        self.nodes, self.outputs = flat.nodes, flat.outputs
        self.origins = {value.name: index for index, node in enumerate(flat.nodes) for value in node.outputs}
        names = {source.name: source.value.name for source in flat.state_tensors}
        self.news = {names[buffer]: new for buffer, new in flat.updates}
        self.reach: set[str] = set()  # what a backward may need
        for node in reversed(flat.nodes):
            if any(each.differentiable or each.name in self.reach for each in node.outputs):
                self.reach.update(each.name for each in node.outputs)
                self.reach.update(node.operands())

    def copies(self) -> tuple[dict[str, int], dict[int, list[str]]]:
        """The index of the node before which each copy is made, and by the index of a node those of its operands that are the
        copies; new values of buffers and outputs are read after the last node."""
        places, renamed = self._step({}, {})
        while (better := self._step(places, renamed)) != (places, renamed):  # a copy may be a new value: it moves others ahead
            places, renamed = better
        return places, renamed

    def _step(self, known: dict[str, int], before: dict[int, list[str]]) -> tuple[dict[str, int], dict[int, list[str]]]:
        end = len(self.nodes)
        as_copies = before.get(end, ())
        written = {  # between two nodes where the new value is a copy
            buffer: known[new] - 0.5 if new in as_copies else float(self.origins.get(new, end))
            for buffer, new in self.news.items()
        }
        old = dict(written)
        places: dict[str, int] = {}
        renamed: dict[int, list[str]] = {}

        def need(name: str, index: int) -> None:
            places[name] = min(places.get(name, index), ceil(old.get(name, index)))
            renamed.setdefault(index, []).append(name)

        for index, node in enumerate(self.nodes):
            operands = dict.fromkeys(name for name in node.operands() if name in old)
            backward = any(each.name in self.reach for each in node.outputs)
            late = [name for name in operands if backward or index > old[name]]
            for name in late:
                need(name, index)
            first = next(iter(node.operands()), "")
            if first in old and first not in late and operation(node.op).shares_storage:
                old.update((each.name, old[first]) for each in node.outputs)
        read = [new for new in self.news.values() if new not in self.origins or new in old]
        for name in dict.fromkeys((*read, *(name for _, name in self.outputs if name in old))):
            need(name, end)
        return places, renamed
