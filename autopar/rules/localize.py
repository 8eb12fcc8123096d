"""The one place that knows which arguments are sizes: turns an operation on global shapes into the one that a rank runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from autopar.ir.dims import BATCH, Dim, Shape, expression, simplify
from autopar.ir.graph import Arg, Node, Symbol

_SIZES_AT = {
    **dict.fromkeys(("reshape", "expand", "new_zeros", "new_ones", "new_full", "new_empty"), 1),
    **dict.fromkeys(("zeros", "ones", "full", "empty"), 0),
}
_GROUPS_AT = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 6),
    "convolution": 8,
    "group_norm": 1,
}
"""Where an operation says in how many groups it takes the channels."""


def localize_args(node: Node, result_shapes: Sequence[Shape], data_size: int = 1, parts: int = 1) -> Node:
    """The node as one rank runs it: sizes in arguments, and the outputs' shapes, become local.

    `result_shapes` are the local shapes of the outputs. `data_size` is what ``B`` shrinks by: with it, a local ``B`` is
    the batch of one data-parallel rank, and numbers that stay global (a divisor ``B*S``) are written ``data_size*B*S``; with
    `parts` micro-batches a local ``B`` is that of one of them, and such a number ``data_size*parts*B*S``.
    """
    outputs = tuple(replace(value, shape=tuple(shape)) for value, shape in zip(node.outputs, result_shapes, strict=True))
    args = tuple(_whole(arg, data_size * parts) for arg in node.args)
    kwargs = tuple((name, _whole(arg, data_size * parts)) for name, arg in node.kwargs)
    packet = node.op.split(".")[1]
    local: dict[tuple[int, str], Arg] = {}
    if packet in _SIZES_AT:
        local[_SIZES_AT[packet], "size"] = _numbers(result_shapes[0])
    elif packet == "slice":
        local = _slice(node, result_shapes[0], data_size)
    elif packet in ("split", "split_with_sizes"):
        local = _split(node, result_shapes, data_size)
    elif packet == "repeat_interleave" and "output_size" in dict(node.kwargs):
        local[len(args), "output_size"] = number(result_shapes[0][_dim(_argument(node, 2, "dim", 0) or 0)])  # type: ignore[index]
    elif packet in _GROUPS_AT:
        local = _groups(node, result_shapes[0], _GROUPS_AT[packet])
    args = tuple(next((new for (at, _), new in local.items() if at == index), arg) for index, arg in enumerate(args))
    names = {name: new for (at, name), new in local.items() if at >= len(args)}
    kwargs = tuple((name, names.get(name, arg)) for name, arg in kwargs)
    return replace(node, args=args, kwargs=kwargs, outputs=outputs)


def number(dim: Dim) -> Arg:
    """A size as an argument."""
    return Symbol(dim) if isinstance(dim, str) else dim


def _numbers(shape: Shape) -> tuple[Arg, ...]:
    return tuple(map(number, shape))


def scale_batch(dim: Dim, data_size: int) -> Dim:
    """A size in the global batch, written in the batch of one data-parallel rank."""
    if isinstance(dim, int) or data_size == 1:
        return dim
    batch = sympy.Symbol(BATCH, integer=True, positive=True)
    return simplify(expression(dim).subs(batch, data_size * batch))


def _whole(arg: Arg, data_size: int) -> Arg:
    if isinstance(arg, Symbol):
        return number(scale_batch(arg.dim, data_size))
    if isinstance(arg, tuple):
        return tuple(_whole(item, data_size) for item in arg)
    return arg


def _argument(node: Node, index: int, name: str, default: Arg) -> Arg:
    return node.args[index] if index < len(node.args) else dict(node.kwargs).get(name, default)


def _dim(arg: Arg) -> Dim:
    return arg.dim if isinstance(arg, Symbol) else int(arg)  # type: ignore[arg-type]


def _slice(node: Node, local: Shape, data_size: int) -> dict[tuple[int, str], Arg]:
    """A cut dimension: start and end shrink like the result; otherwise they stay."""
    dim = _dim(_argument(node, 1, "dim", 0))
    assert isinstance(dim, int)
    whole, size = node.outputs[0].shape[dim], local[dim]
    if scale_batch(whole, data_size) == size:
        return {}
    start = _argument(node, 2, "start", 0)
    begin = expression(_dim(start if start is not None else 0)) * expression(size) / expression(whole)
    return {(2, "start"): number(simplify(begin)), (3, "end"): number(simplify(begin + expression(size)))}


def _split(node: Node, local: Sequence[Shape], data_size: int) -> dict[tuple[int, str], Arg]:
    dim = _dim(_argument(node, 2, "dim", 0))
    assert isinstance(dim, int)
    sizes = [shape[dim] for shape in local]
    if all(scale_batch(value.shape[dim], data_size) == size for value, size in zip(node.outputs, sizes, strict=True)):
        return {}
    if isinstance(node.args[1], tuple):
        return {(1, "split_sizes"): _numbers(tuple(sizes))}
    return {(1, "split_size"): number(sizes[0])}


def _groups(node: Node, local: Shape, at: int) -> dict[tuple[int, str], Arg]:
    """Groups of channels: a rank has as many as it has of the result's channels."""
    name = "num_groups" if at == 1 else "groups"
    groups, whole = _argument(node, at, name, 1), node.outputs[0].shape
    packet = node.op.split(".")[1]
    spatial = len(node.args[3]) if packet == "convolution" else int(packet[-2]) if at > 1 else len(whole) - 2  # type: ignore[arg-type]
    channels = len(whole) - spatial - 1
    if groups == 1 or local[channels] == whole[channels]:
        return {}
    return {(at, name): number(simplify(expression(_dim(groups)) * expression(local[channels]) / expression(whole[channels])))}
