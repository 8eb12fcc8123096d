"""Pooling, interpolation and sampling of images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.images import space
from autopar.operations.notation.line_text import fixed, leading_dims, letter, line_text
from autopar.operations.notation.rule import DerivedLine, NamedFunction, argument
from autopar.operations.notation.spelling import OperationCall, function
from autopar.operations.operation import Operation, several


def pool_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> space.Halo | None:
    """The rows of `convolution_halo` for pooling that does not round up and, where it takes means, counts its padding."""
    count, at, highest = len(shapes[0]) - 2, dim - 2, "max_pool" in node.op
    kernel = space.numbers(argument(node, 1, "kernel_size"), count, 1)
    stride = space.numbers(argument(node, 2, "stride"), count, 0)
    padding = space.numbers(argument(node, 3, "padding"), count, 0)
    dilation = space.numbers(argument(node, 4, "dilation"), count, 1) if highest else [1] * count
    if kernel is None or stride is None or padding is None or dilation is None:
        return None
    whole = argument(node, 5 if highest else 4, "ceil_mode", False) is False
    plain = highest or (argument(node, 5, "count_include_pad", True) is True and argument(node, 6, "divisor_override") is None)
    step = stride[at] or kernel[at]
    if not whole or not (plain or not any(padding)):
        return None
    return space.window_halo(node, shapes, dim, (dilation[at] * (kernel[at] - 1), step, padding[at]))


def interpolation_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> space.Halo | None:
    """The rows of `convolution_halo` for ``upsample_nearest`` and (bi-, tri-)linear interpolation to a multiple of the rows."""
    rows, result = shapes[0][dim], node.outputs[0].shape[dim]
    nearest = "nearest" in node.op
    scales = argument(node, 2 if nearest else 3, "scale_factors")
    whole = isinstance(rows, int) and isinstance(result, int) and result % rows == 0
    if not node.op.endswith(".vec") or not whole:
        return None
    if argument(node, 1, "output_size") is None and (
        not isinstance(scales, tuple) or scales[dim - 2] * rows != result  # type: ignore[operator]
    ):
        return None
    return (0, 0) if nearest or result == rows else (1, 1)


def space_rule(halo: space.HaloOf, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Pooling and interpolation: all dimensions before those of space, and one of these."""
    count = len(shapes[0]) - int(node.op.split(".")[1][-2])
    if count != 2 or len(node.outputs) > 1:
        return leading_dims(count, node, shapes)
    operand, result = space.space_words(node, shapes, halo)
    leading = [letter(index) for index in range(count)]
    return DerivedLine(line_text([[*leading, *operand]], [[*leading, *result]]))


def space_whole_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Pooling with indices, bicubic interpolation: all dimensions before those of space, which the name counts."""
    spatial = next(int(digit) for digit in node.op if digit.isdigit())
    return leading_dims(-spatial, node, shapes)


def adaptive_mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``adaptive_avg_pool2d`` and ``3d``: all but the dimensions of space, and one of these where the result has one pixel."""
    count = int(node.op.split(".")[1][-2])
    single = len(shapes[0]) == count + 2 and all(size == 1 for size in node.outputs[0].shape[2:])
    words = space.mean_words(shapes[0]) if single else None
    return leading_dims(-count, node, shapes) if words is None else space.mean_line(node, words)


def batch_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``im2col col2im``: examples only."""
    return leading_dims(1, node, shapes) if len(shapes[0]) == (4 if node.op == "aten.im2col" else 3) else None


def grid_sampler_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.grid_sampler(x, grid)``: examples, channels, and the places that are sampled."""
    spatial = len(shapes[0]) - 2
    places = [f"place{i}" for i in range(spatial)]
    x = ["n", "c", *map(fixed, shapes[0][2:])]
    return DerivedLine(line_text([x, ["n", *places, fixed(spatial)]], [["n", "c", *places]]))


def _adaptive_pool(call: OperationCall) -> str | None:
    """``F.adaptive_avg_pool2d(x, (1, 1))``, which is stricter than the operation about tensors of two dimensions."""
    return function("F")(call) if len(call.node.outputs[0].shape) > 2 else None


_MAX = Operation("aten", partial(space_rule, pool_halo), functions=space.exchanging("ap.max_pool_halo", pool_halo))
_MEAN = replace(_MAX, functions=space.exchanging("ap.avg_pool_halo", pool_halo))
_NEAREST = Operation("aten", partial(space_rule, interpolation_halo))
_LINEAR = replace(_NEAREST, functions=space.exchanging("ap.interpolate_halo", interpolation_halo))
_ADAPTIVE = Operation(
    "aten", adaptive_mean_rule, functions=(NamedFunction(space.HALO, "ap.adaptive_avg_pool_space", at=space.SPACE),)
)

OPERATIONS = (
    *several(_MAX, "max_pool1d max_pool3d"),
    *several(_MEAN, "avg_pool1d avg_pool3d"),
    replace(_MAX, name="aten.max_pool2d", spelling=function("F")),
    replace(_MEAN, name="aten.avg_pool2d", spelling=function("F")),
    *several(_LINEAR, "upsample_linear1d upsample_bilinear2d upsample_trilinear3d"),
    *several(_NEAREST, "upsample_nearest1d upsample_nearest2d upsample_nearest3d"),
    *several(_ADAPTIVE, "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"),
    replace(_ADAPTIVE, name="aten.adaptive_avg_pool2d", spelling=_adaptive_pool),
    *several(
        Operation("aten", space_whole_rule),
        """adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d""",
    ),
    *several(Operation("aten", batch_rule), "im2col col2im"),
    *several(Operation("aten", grid_sampler_rule), "grid_sampler grid_sampler_2d grid_sampler_3d"),
)
