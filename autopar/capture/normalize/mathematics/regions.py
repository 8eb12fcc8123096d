"""Regions of a graph: the pointwise operations, and means over the last dimension, between one tensor and one result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import torch

from autopar.capture.flat import Lookup, rename_operands
from autopar.ir.graph import Node, Value
from autopar.operations.pointwise import CAST

_POINTWISE = """add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg square
sqrt rsqrt reciprocal pow.Tensor_Scalar pow.Scalar exp log log1p tanh erf sigmoid softplus"""
MOST_NODES = 24
"""Of a region: a norm that casts both ways and has a weight and a bias needs half of them."""
_REDUCTIONS = "mean.dim sum.dim_IntList var.correction var.dim"
ROW_OPERATIONS = frozenset(f"aten.{name}" for name in f"{_POINTWISE} {_REDUCTIONS}".split()) | {CAST}
"""What a region is made of. A reduction may be over any dimensions: the proof tells."""


@dataclass(frozen=True, slots=True)
class WrittenRegion:
    """Nodes that compute one value of `x` and, at most, of vectors as long as its last dimension.

    Values have the names of their places, so that equal layers have equal regions.
    """

    nodes: tuple[Node, ...]
    x: Value
    vectors: tuple[Value, ...]

    @property
    def root(self) -> Value:
        """The value that it computes."""
        return self.nodes[-1].outputs[0]


Cut = tuple[WrittenRegion, tuple[str, ...], tuple[Node, ...]]
"""A region, and its operands (x first) and nodes in the graph."""


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
            if readers[name] == 1 and producer is not None and producer.op in ROW_OPERATIONS:
                heappush(heap, (-places[name], name))
        while heap and not waiting and len(inside) < MOST_NODES:  # the latest first: all that may read it is inside by then
            name = heappop(heap)[1]
            if readers[name] == graph.uses[name]:
                inside.append(graph.producers[name])
                waiting.append(graph.producers[name])
    return inside[::-1]


def _between(x: str, inside: list[Node], graph: Lookup) -> Cut | None:
    """The region from `x` to the last node; None where it reads another tensor, or is somewhere rounded more than `x` is."""
    value, root = graph.values[x], inside[-1].outputs[0]
    if (value.shape, value.dtype) != (root.shape, root.dtype) or len(value.shape) < 2 or not _floats(value.dtype):
        return None
    after = {x}
    nodes = []
    for node in inside:
        if not after.isdisjoint(node.operands()):
            nodes.append(node)
            after.update(result.name for result in node.outputs)
    vectors = list(dict.fromkeys(name for node in nodes for name in node.operands() if name not in after))
    if len(nodes) < 2 or root.name not in after or any(node.no_grad != nodes[-1].no_grad for node in nodes):
        return None
    if any(graph.values[name].shape != value.shape[-1:] or graph.values[name].dtype != value.dtype for name in vectors):
        return None
    if not all(_holds(result.dtype, value.dtype) for node in nodes for result in node.outputs):
        return None  # it rounds to less than x has
    return _at_places(nodes, (x, *vectors), graph), (x, *vectors), tuple(nodes)


def _at_places(nodes: list[Node], operands: tuple[str, ...], graph: Lookup) -> WrittenRegion:
    """A region whose values are named after their places."""
    names = {name: f"operand_{place}" for place, name in enumerate(operands)}
    out = []
    for place, node in enumerate(nodes):
        new = rename_operands(node, names)
        names[node.name] = f"value_{place}"
        out.append(replace(new, outputs=(replace(node.outputs[0], name=names[node.name]),), module="", source=""))
    x, *vectors = (replace(graph.values[name], name=names[name]) for name in operands)
    return WrittenRegion(tuple(out), x, tuple(vectors))


def _floats(dtype: str) -> bool:
    floats: bool = getattr(torch, dtype).is_floating_point
    return floats


def _holds(dtype: str, other: str) -> bool:
    """Whether a number of the other type stays what it is in this one."""
    one, two = getattr(torch, dtype), getattr(torch, other)
    return one == two or (one.is_floating_point and one.itemsize > two.itemsize)
