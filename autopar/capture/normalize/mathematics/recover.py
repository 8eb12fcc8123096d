"""The functions that a region may be, and the rewrite of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import permutations, product
from os.path import commonprefix

import torch.nn.functional as F
from torch import Tensor

from autopar.capture.flat import FlatGraph, Lookup, drop_dead
from autopar.capture.normalize.mathematics.proof import Function, equal
from autopar.capture.normalize.mathematics.regions import WrittenRegion, is_of_rows, regions
from autopar.ir.graph import Arg, Kwargs, Node, Ref, leaves
from autopar.operations.pointwise import ROTARY_EMBEDDING
from autopar.runtime.ops.functions import PAIR_LAYOUTS, rotary_embedding

MOST_EPSILON = 0.1


@dataclass(frozen=True, slots=True)
class TorchFunction:
    """A function of torch that a region may be: what runs, and the arguments of its node, with the region's names of operands."""

    op: str
    function: Function
    args: tuple[Arg, ...]
    kwargs: Kwargs = ()


def written_out(flat: FlatGraph) -> FlatGraph:
    """Norms and activations that the model writes out become one operation, where it is equal in exact arithmetic and rounds no
    more."""
    graph = Lookup(flat)
    places = {value.name: place for place, node in enumerate(flat.nodes) for value in node.outputs}
    inside: set[str] = set()
    roots: dict[str, Node] = {}
    for root in reversed(flat.nodes):  # a weight is applied last, and belongs to its norm
        if root.name in inside or len(root.outputs) > 1 or not is_of_rows(root, graph):
            continue
        for region, operands, nodes in regions(root, graph, places):
            if (candidate := recover(region)) is not None:
                inside.update(node.name for node in nodes)
                roots[root.name] = _node(candidate, operands, nodes)
                break
    return drop_dead(replace(flat, nodes=tuple(roots.get(node.name, node) for node in flat.nodes))) if roots else flat


@lru_cache(maxsize=256)  # equal layers, and the exports of one process
def recover(region: WrittenRegion) -> TorchFunction | None:
    """Return the operation that a region is, proven by execution; None where none is known."""
    found = list(_candidates(region))
    place = equal(region, [candidate.function for candidate in found]) if found else None
    return None if place is None else found[place]


def _candidates(region: WrittenRegion) -> Iterator[TorchFunction]:
    """List the operations that a region may be, by those that no way to write them can do without."""
    ops = Counter(node.op.split(".")[1] for node in region.nodes)
    x = Ref(region.x.name)
    if not region.others:
        if ops["tanh"] == 1:
            tanh = (("approximate", "tanh"),)
            yield TorchFunction("aten.gelu", partial(F.gelu, approximate="tanh"), (x,), tanh)
            yield TorchFunction("aten.mish", F.mish, (x,))
        if ops["erf"] == 1:
            yield TorchFunction("aten.gelu", F.gelu, (x,))
        if ops["sigmoid"] + ops["exp"] == 1:
            yield TorchFunction("aten.silu", F.silu, (x,))
    if ops["cat"] + ops["stack"] == 1 and not ops["to"] and len(region.others) == 2:
        for order, layout in product(permutations(range(2)), PAIR_LAYOUTS):
            function = partial(_rotary_embedding, order=order, layout=layout)
            tables = (Ref(region.others[place].name) for place in order)
            yield TorchFunction(ROTARY_EMBEDDING, function, (x, *tables, *((layout,) if layout != PAIR_LAYOUTS[0] else ())))
    length = region.x.shape[-1]
    assert isinstance(length, int)
    are_weights = all((other.shape, other.dtype) == ((length,), region.x.dtype) for other in region.others)
    if are_weights and any(map(ops.get, ("rsqrt", "sqrt", "pow"))) and any(map(ops.get, ("mean", "sum", "var"))):
        for epsilon in _epsilons(region):
            yield from _norms(region, length, epsilon)


def _norms(region: WrittenRegion, length: int, epsilon: float) -> Iterator[TorchFunction]:
    """The norms over the last dimension, with the other operands as weight and bias in any order."""
    x = Ref(region.x.name)
    places = range(len(region.others))
    if len(places) < 2:
        weight = tuple(Ref(vector.name) for vector in region.others) or (None,)
        yield TorchFunction("aten.rms_norm", partial(_rms_norm, epsilon=epsilon), (x, (length,), *weight, epsilon))
    for order in permutations(places) if len(places) < 3 else ():
        vectors = tuple(Ref(region.others[place].name) for place in order) + (None,) * (2 - len(order))
        function = partial(_layer_norm, order=order, epsilon=epsilon)
        yield TorchFunction("aten.layer_norm", function, (x, (length,), *vectors, epsilon, False))


def _rms_norm(x: Tensor, weight: Tensor | None = None, *, epsilon: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


def _layer_norm(x: Tensor, *vectors: Tensor, order: tuple[int, ...], epsilon: float) -> Tensor:
    weight, bias = (*(vectors[place] for place in order), None, None)[:2]
    return F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


def _rotary_embedding(x: Tensor, *others: Tensor, order: tuple[int, ...], layout: str) -> Tensor:
    cos, sin = (others[place] for place in order)
    return rotary_embedding(x, cos, sin, layout)


def _epsilons(region: WrittenRegion) -> list[float]:
    """The small numbers that a region adds, each once."""
    numbers = (leaf for node in region.nodes if ".add" in node.op for arg in node.args for leaf in leaves(arg))
    return list(dict.fromkeys(leaf for leaf in numbers if isinstance(leaf, float) and 0 < leaf < MOST_EPSILON))


def _node(candidate: TorchFunction, operands: tuple[str, ...], nodes: tuple[Node, ...]) -> Node:
    """The operation in the place of the region's last node, in the module that all of it is from."""
    names = {f"operand_{place}": name for place, name in enumerate(operands)}
    args = tuple(Ref(names[arg.name]) if isinstance(arg, Ref) else arg for arg in candidate.args)
    parts = commonprefix([node.module.split(".") for node in nodes])
    return replace(nodes[-1], op=candidate.op, args=args, kwargs=candidate.kwargs, module=".".join(parts))
