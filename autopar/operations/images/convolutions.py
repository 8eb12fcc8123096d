"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Node, Symbol
from autopar.operations.images.space import Halo, HaloOf, exchanging, numbers, space_words, window_halo
from autopar.operations.notation.line_text import fixed, line_text
from autopar.operations.notation.rule import DerivedLine, argument
from autopar.operations.notation.spelling import OperationCall, function
from autopar.operations.operation import Operation, Sizes, packet, several


def convolution_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> Halo | None:
    """Rows before and after the shard that ``conv1d`` to ``conv3d`` reads along `dim`; None where shards do not match."""
    count, at = len(shapes[0]) - 2, dim - 2
    stride, dilation = (numbers(argument(node, place, name), count, 1) for place, name in ((3, "stride"), (5, "dilation")))
    size = shapes[1][dim]
    if stride is None or dilation is None or not isinstance(size, int):
        return None
    reach = dilation[at] * (size - 1)
    given = argument(node, 4, "padding", 0)
    padding = [reach // 2 if given == "same" else 0] * count if isinstance(given, str) else numbers(given, count, 0)
    return None if padding is None else window_halo(node, shapes, dim, (reach, stride[at], padding[at]))


def transposed_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> Halo | None:
    """The rows of `convolution_halo` for ``conv_transpose1d`` to ``3d``; None too where windows leave rows out."""
    count, at = len(shapes[0]) - 2, dim - 2
    given = [numbers(argument(node, place, name), count, default) for place, name, default in _TRANSPOSED]
    size, rows = shapes[1][dim], shapes[0][dim]
    if any(item is None for item in given) or not isinstance(size, int) or not isinstance(rows, int):
        return None
    stride, padding, dilation = (item[at] for item in given if item is not None)
    reach = dilation * (size - 1)
    if node.outputs[0].shape[dim] != stride * rows or reach + 1 < stride or padding > reach:
        return None
    return (reach - padding) // stride, -(-padding // stride)


_TRANSPOSED = ((3, "stride", 1), (4, "padding", 0), (7, "dilation", 1))


def convolution_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``conv1d conv2d conv3d convolution``: batch, input channels (summed), output channels; with groups, the groups; space."""
    general = node.op == "aten.convolution"
    if general and argument(node, 6, "transposed", False):
        return transposed_convolution_rule(node, shapes)
    groups = argument(node, 8 if general else 6, "groups", 1)
    into, out, within = ("c+", "o", "c+") if groups == 1 else ("(g c!)", "(g o!)", "c!")
    return _convolution(node, shapes, (into, [out, within], out), groups, None if general else convolution_halo)


def transposed_convolution_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``conv_transpose1d`` to ``3d``: as a convolution, whose weight has the input channels first."""
    general = node.op == "aten.convolution"
    groups = argument(node, 8 if general else 6, "groups", 1)
    into, out, within = ("c+", "o", "o") if groups == 1 else ("(g c!)", "(g o!)", "o!")
    return _convolution(node, shapes, (into, [into, within], out), groups, None if general else transposed_halo)


def _convolution(
    node: Node, shapes: tuple[Shape, ...], channels: tuple[str, list[str], str], groups: Arg, halo: HaloOf | None
) -> DerivedLine:
    """`channels` are the words of the channels of the input, of the first two dimensions of the weight, and of the result."""
    result = node.outputs[0].shape
    batch = ["n"] if len(shapes[0]) == len(shapes[1]) else []
    spaces = space_words(node, shapes, halo) if batch else [list(map(fixed, shape[1:])) for shape in (shapes[0], result)]
    x = [*batch, channels[0], *spaces[0]]
    weight = [*channels[1], *map(fixed, shapes[1][2:])]
    bias = [[channels[2]] for _ in shapes[2:]]
    known = () if groups == 1 else (("g", _size(groups)),)
    return DerivedLine(line_text([x, weight, *bias], [[*batch, channels[2], *spaces[1]]]), known)


def _size(groups: Arg) -> Dim:
    """The number of groups, which may be one of the batch: a filter for each example."""
    return groups.dim if isinstance(groups, Symbol) else int(groups)  # type: ignore[arg-type]


def convolution_groups(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> int:
    """The number of groups, from the sizes of operands and result, which have channels in dimension 1."""
    return (out[0] if _is_transposed(node) else a[0])[1] // a[1][1]


def _is_transposed(node: Node) -> bool:
    return "transpose" in node.op or (packet(node.op) == "aten.convolution" and bool(argument(node, 6, "transposed", False)))


def _flops(node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod((a if _is_transposed(node) else out)[0]) * prod(a[1][1:])


def _expression(call: OperationCall) -> str | None:
    args = call.node.args
    if len(args) != 9 or call.kwargs or args[6] is not False or not isinstance(args[3], tuple):
        return None
    shown = [*call.args[:6], call.args[8]]
    return f"F.conv{len(args[3])}d({', '.join(shown)})"


OPERATIONS = (
    *several(
        Operation(
            "aten", convolution_rule, functions=exchanging("ap.convolution_halo", convolution_halo), flops=_flops,
            convolution=True, groups_at=6, layer=True, named_after_module=True, spelling=function("torch"),
        ),
        "conv1d conv2d",
    ),
    Operation(
        "aten.conv3d", convolution_rule, functions=exchanging("ap.convolution_halo", convolution_halo), flops=_flops,
        convolution=True, groups_at=6, spelling=function("torch"),
    ),
    Operation(
        "aten.convolution", convolution_rule, flops=_flops, convolution=True, groups_at=8, layer=True, named_after_module=True,
        spelling=_expression,
    ),
    *several(
        Operation(
            "aten", transposed_convolution_rule, functions=exchanging("ap.transposed_convolution_halo", transposed_halo),
            flops=_flops, convolution=True, groups_at=6,
        ),
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
)  # fmt: skip
