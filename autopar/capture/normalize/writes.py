"""Rewrites writes into slices of a tensor: ``copy`` becomes its source, and a tensor that is filled slice by slice a ``cat``."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rename_operands, rewrite_nodes, size_args
from autopar.ir.dims import Dim
from autopar.ir.graph import DType, Node, Ref
from autopar.operations.pointwise import CLONE

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
    loss reads, a mask that it computes again), and by another buffer (``self.before, self.now = self.now, y``). Each new value is
    the result of an operation (``self.last.copy_(x)``)."""
    graph = Lookup(flat)
    copies: dict[str, str] = {}
    reach: set[str] = set()  # what a backward may need
    for node in reversed(flat.nodes):
        if any(each.differentiable or each.name in reach for each in node.outputs):
            reach.update(each.name for each in node.outputs)
            reach.update(node.operands())

    def copied(name: str, module: str) -> list[Node]:
        if name in copies:
            return []
        copies[name] = f"{name}_as_it_was"  # nobody's buffer, where `queue_before` may be one
        value = replace(graph.values[name], name=copies[name], differentiable=False)
        return [Node(CLONE, (Ref(name),), (), (value,), module=module)]

    def step(node: Node) -> Rewritten | None:
        old = [name for name in node.operands() if name in graph.written]
        if not old or not any(each.name in reach for each in node.outputs):
            return None
        clones = [clone for name in old for clone in copied(name, node.module)]
        return (*clones, rename_operands(node, {name: copies[name] for name in old})), {}

    flat = rewrite_nodes(flat, step)
    nodes, updates = list(flat.nodes), []
    for buffer, name in flat.updates:
        if name not in graph.producers or name in graph.written:
            nodes += copied(name, buffer.rpartition(".")[0])
            name = copies[name]
        updates.append((buffer, name))
    return replace(flat, nodes=tuple(nodes), updates=tuple(updates))
