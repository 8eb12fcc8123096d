"""Regions of a graph: the operations within rows, the last dimension, between one tensor and one result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import torch

from autopar.capture.flat import Lookup, rename_operands
from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Value
from autopar.operations.notation.rule import argument
from autopar.operations.pointwise import CAST

_POINTWISE = """add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg square
sqrt rsqrt reciprocal pow.Tensor_Scalar pow.Scalar exp log log1p tanh erf sigmoid softplus"""
MOST_NODES = 24
"""The most nodes of a region: a norm that casts both ways and has a weight and a bias needs half of them."""
_REDUCTIONS = "mean.dim sum.dim_IntList var.correction var.dim"
_ROW_OPERATIONS = frozenset(f"aten.{name}" for name in f"{_POINTWISE} {_REDUCTIONS}".split()) | {CAST}
"""What a region is made of. A reduction may be over any dimensions: the proof tells."""
_ALONG = {"aten.slice.Tensor": 1, "aten.cat": 1, "aten.stack": 1, "aten.split.Tensor": 2}
"""Operations along one dimension (0 by default), of which a region has those along rows: the position of that argument."""
MERGE = "aten.reshape"
"""It merges the last two dimensions in a region."""


@dataclass(frozen=True, slots=True)
class WrittenRegion:
    """Nodes that compute one value of `x` and, at most, of other tensors that broadcast to it, whose last dimension may be half
    as long.

    Values have the names of their places, so that equal layers have equal regions.
    """

    nodes: tuple[Node, ...]
    x: Value
    others: tuple[Value, ...]

    @property
    def root(self) -> Value:
        """The value that it computes."""
        return self.nodes[-1].outputs[0]


Cut = tuple[WrittenRegion, tuple[str, ...], tuple[Node, ...]]
"""A region, and its operands (x first) and nodes in the graph."""


def is_of_rows(node: Node, graph: Lookup) -> bool:
    """Return whether a region may contain the node."""
    shape = node.outputs[0].shape
    if node.op in _ALONG:
        dim = argument(node, _ALONG[node.op], "dim", 0)
        return isinstance(dim, int) and len(shape) > 0 and dim % len(shape) == len(shape) - 1
    if node.op == MERGE:
        (before,) = (graph.values[name].shape for name in node.operands())
        return len(before) == len(shape) + 1 and before[:-2] == shape[:-1]
    return node.op in _ROW_OPERATIONS


def regions(root: Node, graph: Lookup, places: Mapping[str, int]) -> Iterator[Cut]:
    """Yield the regions that end in `root`, the largest first."""
    inside = _single_exit(root, graph, places)
    entries = [name for node in inside for name in node.operands()]
    for x in sorted(set(entries), key=lambda name: places.get(name, -1)):
        if (region := _between(x, inside, graph)) is not None:
            yield region


def _single_exit(root: Node, graph: Lookup, places: Mapping[str, int]) -> list[Node]:
    """The nodes, in order, whose results are read by each other alone, up to the last one."""
    readers: dict[str, int] = {}
    inside, waiting = [root], [root]
    heap: list[tuple[int, str]] = []
    while waiting:
        for name in waiting.pop().operands():
            readers[name] = readers.get(name, 0) + 1
            producer = graph.producers.get(name)
            if readers[name] == 1 and producer is not None and is_of_rows(producer, graph):
                heappush(heap, (-places[name], name))
        while heap and not waiting and len(inside) < MOST_NODES:  # the latest first: all that may read it is inside by then
            node = graph.producers[heappop(heap)[1]]
            if node is not inside[-1] and all(readers.get(each.name, 0) == graph.uses.get(each.name, 0) for each in node.outputs):
                inside.append(node)
                waiting.append(node)
    return inside[::-1]


def _between(x: str, inside: list[Node], graph: Lookup) -> Cut | None:
    """The region from `x` to the last node; None where it reads another tensor, or is somewhere rounded more than `x` is."""
    value, root = graph.values[x], inside[-1].outputs[0]
    if (value.shape, value.dtype) != (root.shape, root.dtype) or not _dtype(value.dtype).is_floating_point:
        return None
    if len(value.shape) < 2 or not isinstance(value.shape[-1], int):
        return None
    after = {x}
    nodes = []
    for node in inside:
        if not after.isdisjoint(node.operands()):
            nodes.append(node)
            after.update(result.name for result in node.outputs)
    others = list(dict.fromkeys(name for node in nodes for name in node.operands() if name not in after))
    if len(nodes) < 2 or root.name not in after or any(node.no_grad != nodes[-1].no_grad for node in nodes):
        return None
    operands = [graph.values[name] for name in others]
    if not all(_holds(value.dtype, each.dtype) and _broadcasts(each.shape, value.shape) for each in operands):
        return None
    if not all(_holds(result.dtype, value.dtype) for node in nodes for result in node.outputs):
        return None  # it rounds to less than x has
    return _at_places(nodes, (x, *others), graph), (x, *others), tuple(nodes)


def _broadcasts(shape: Shape, other: Shape) -> bool:
    """Return whether a tensor of `shape` broadcasts to the shape `other`, or to one whose last dimension is half as long."""
    if not shape or len(shape) > len(other) or shape[-1] not in (1, other[-1], int(other[-1]) // 2):
        return False
    return all(one in (1, two) for one, two in zip(shape[-2::-1], other[-2::-1], strict=False))


def _at_places(nodes: list[Node], operands: tuple[str, ...], graph: Lookup) -> WrittenRegion:
    """A region whose values are named after their places."""
    names = {name: f"operand_{place}" for place, name in enumerate(operands)}
    out = []
    for place, node in enumerate(nodes):
        new = rename_operands(node, names)
        names |= {value.name: f"value_{place}_{index}" for index, value in enumerate(node.outputs)}
        outputs = tuple(replace(value, name=names[value.name]) for value in node.outputs)
        out.append(replace(new, outputs=outputs, module="", source=""))
    x, *others = (replace(graph.values[name], name=names[name]) for name in operands)
    return WrittenRegion(tuple(out), x, tuple(others))


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _holds(dtype: str, other: str) -> bool:
    """Return whether every number of the type `other` is one of `dtype`."""
    one, two = (_dtype(name) for name in (dtype, other))
    return one == two or (one.is_floating_point and two.is_floating_point and one.itemsize > two.itemsize)
