"""The functions that a region may be, whether it is one of them (both are executed in float64, values and gradients), and the
rewrite of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import permutations, product
from os.path import commonprefix
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.capture.constants import concrete, kwargs_of, resolve
from autopar.capture.flat import FlatGraph, Lookup, drop_dead
from autopar.capture.normalize.mathematics.regions import MERGE, WrittenRegion, is_of_rows, regions
from autopar.ir.graph import Arg, Kwargs, Node, Ref, leaves
from autopar.operations.pointwise import CAST, ROTARY_EMBEDDING
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


SCALES = (0.0, 1e-6, 1e-3, 1.0, 30.0)
"""Magnitudes of the rows of x: zero, where an epsilon of any size tells, next to that of a norm, and out to where an activation
is flat."""
RELATIVE, ABSOLUTE = 1e-10, 1e-12

Function = Callable[..., Tensor]


def equal(region: WrittenRegion, functions: list[Function]) -> int | None:
    """Return the place of the first function that equals the region in its operands, None where none does."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():  # whatever mode the caller is in
        operands = _operands(region)
        expected = _derivatives(lambda *tensors: _run(region, tensors), operands)
        for place, function in enumerate(functions if expected else ()):
            found = _derivatives(function, operands)
            if found and all(map(_close, found, expected)):
                return place
    return None


def _close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, RELATIVE, ABSOLUTE)


def _operands(region: WrittenRegion) -> tuple[Tensor, ...]:
    """Random operands; the rows of x have the sizes of `SCALES`."""
    draws = torch.Generator().manual_seed(0)
    leading = len(SCALES), *(2,) * (len(region.x.shape) - 2)
    shapes = [(*leading, region.x.shape[-1])]
    for value in region.others:
        *before, last = value.shape
        rows = leading[len(leading) - len(before) :]
        shapes.append((*(1 if own == 1 else size for own, size in zip(before, rows, strict=True)), last))
    x, *others = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes)  # type: ignore[arg-type]
    x *= torch.tensor(SCALES, dtype=torch.float64).view(-1, *(1,) * len(leading))
    return tuple(tensor.requires_grad_() for tensor in (x, *others))


def _derivatives(function: Function, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The value, and the gradients of a random combination of its elements; nothing where it has no value at these sizes."""
    try:
        value = function(*operands)
    except (RuntimeError, IndexError):
        return ()
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return value.detach(), *torch.autograd.grad(value, operands, weights, materialize_grads=True)


def _run(region: WrittenRegion, operands: tuple[Tensor, ...]) -> Tensor:
    tensors = dict(zip((value.name for value in (region.x, *region.others)), operands, strict=True))
    for node in region.nodes:
        if node.op == CAST:  # to more digits than x has, and back
            results: Any = tensors[node.operands()[0]]
        elif node.op == MERGE:  # its sizes are those of the graph
            results = tensors[node.operands()[0]].flatten(-2)
        else:
            args = (concrete(arg, tensors, len(SCALES)) for arg in node.args)
            results = resolve(node.op)(*args, **kwargs_of(node, tensors, len(SCALES)))
        several = results if isinstance(results, (tuple, list)) else (results,)
        tensors.update(zip((value.name for value in node.outputs), several, strict=True))
    return tensors[region.root.name]
