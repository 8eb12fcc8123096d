"""Images ``[n, c, ...]`` that are cut along one dimension of space: words and named functions of convolutions, pooling,
interpolation and norms.

Of an image the longest dimension of space may be cut (the first of equal ones), so that all operations of a network agree. The
result must be `stride` times shorter (or longer), so that shards of both match: ``(row 2) -> row``. Where results read rows of
their own shard only (kernel and stride are equal), the factor is ``row`` and the local operation is the same. Else it is
``halo``, and a named function gets `before` and `after` rows from the neighbours: a halo, which is no larger than their shards.
"""

from __future__ import annotations

from math import prod

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node
from autopar.operations.notation.line_text import fixed
from autopar.operations.notation.rule import NamedFunction, OperationCollective, argument

SMALLEST = 4096
"""Pixels of an image below which it is not cut: its activations are small, and a rank's part would be mostly halo."""

OWN, HALO = "row", "halo"
"""The factor of the cut dimension: without and with rows from the neighbours. No other line has a factor of these names."""

PADDED = frozenset(("ap.convolution_halo", "ap.transposed_convolution_halo", "ap.max_pool_halo", "ap.avg_pool_halo",
                    "ap.interpolate_halo"))  # fmt: skip
"""Functions that hold a padded copy of their first operand while they run."""

Halo = tuple[int, int]


def cut_dim(shape: Shape) -> int | None:
    """The dimension of an image ``[n, c, ...]`` that may be cut; None where it is small."""
    space = [size for size in shape[2:] if isinstance(size, int)]
    if not space or len(space) < len(shape) - 2 or prod(space) < SMALLEST:
        return None
    return 2 + space.index(max(space))


def numbers(arg: Arg, count: int, default: int) -> list[int] | None:
    """An argument as one number for each dimension of space; None where it is none."""
    listed = (default,) if arg is None or arg == () else arg if isinstance(arg, tuple) else (arg,)
    out = [item for item in listed if isinstance(item, int) and not isinstance(item, bool)]
    if len(listed) not in (1, count) or len(out) < len(listed):
        return None
    return out * (count if len(out) == 1 else 1)


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
    return None if padding is None else _reads(node, shapes, dim, (reach, stride[at], padding[at]))


def _reads(node: Node, shapes: tuple[Shape, ...], dim: int, window: tuple[int, int, int]) -> Halo | None:
    """Of windows of ``reach + 1`` rows, `stride` apart, the first of which begins `padding` rows before the image."""
    reach, stride, padding = window
    result = node.outputs[0].shape[dim]
    if not isinstance(result, int) or result * stride != shapes[0][dim]:
        return None
    return padding, max(0, reach + 1 - stride - padding)


def transposed_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> Halo | None:
    """As `convolution_halo`, of ``conv_transpose1d`` to ``3d``; None too where windows leave rows out."""
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


def pool_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> Halo | None:
    """As `convolution_halo`, of pooling that does not round up and, where it takes means, counts its padding."""
    count, at, highest = len(shapes[0]) - 2, dim - 2, "max_pool" in node.op
    kernel = numbers(argument(node, 1, "kernel_size"), count, 1)
    stride = numbers(argument(node, 2, "stride"), count, 0)
    padding = numbers(argument(node, 3, "padding"), count, 0)
    dilation = numbers(argument(node, 4, "dilation"), count, 1) if highest else [1] * count
    if kernel is None or stride is None or padding is None or dilation is None:
        return None
    whole = argument(node, 5 if highest else 4, "ceil_mode", False) is False
    plain = highest or (argument(node, 5, "count_include_pad", True) is True and argument(node, 6, "divisor_override") is None)
    step = stride[at] or kernel[at]
    if not whole or not (plain or not any(padding)):
        return None
    return _reads(node, shapes, dim, (dilation[at] * (kernel[at] - 1), step, padding[at]))


def interpolation_halo(node: Node, shapes: tuple[Shape, ...], dim: int) -> Halo | None:
    """As `convolution_halo`, of ``upsample_nearest`` and (bi-, tri-)linear interpolation to a multiple of the rows."""
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


HALOS = {
    **{f"aten.conv{n}d": convolution_halo for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": transposed_halo for n in (1, 2, 3)},
    **{f"aten.{kind}_pool{n}d": pool_halo for n in (1, 2, 3) for kind in ("max", "avg")},
    **{f"aten.upsample_nearest{n}d": interpolation_halo for n in (1, 2, 3)},
    **{f"aten.upsample_{kind}{n}d": interpolation_halo for n, kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))},
}
"""By operation without overload."""


def halo_of(node: Node, shapes: tuple[Shape, ...]) -> tuple[int, Halo] | None:
    """The dimension that may be cut, and its halo; None where none may."""
    packet = ".".join(node.op.split(".")[:2])
    found, result = HALOS.get(packet), node.outputs[0].shape
    if found is None or len(shapes[0]) != int(packet[-2]) + 2 or len(node.outputs) > 1:
        return None
    larger = max(shapes[0], result, key=lambda shape: prod(size for size in shape[2:] if isinstance(size, int)))
    dim = cut_dim(larger)
    halo = None if dim is None else found(node, shapes, dim)
    return None if dim is None or halo is None else (dim, halo)


def space_words(node: Node, shapes: tuple[Shape, ...]) -> tuple[list[str], list[str]]:
    """The words of the dimensions of space of the first operand and of the result."""
    words = [fixed(size) for size in shapes[0][2:]], [fixed(size) for size in node.outputs[0].shape[2:]]
    found = halo_of(node, shapes)
    if found is not None:
        dim, halo = found
        factor = HALO if any(halo) else OWN
        rows, result = shapes[0][dim], node.outputs[0].shape[dim]
        assert isinstance(rows, int) and isinstance(result, int)
        for side, mine, other in ((words[0], rows, result), (words[1], result, rows)):
            side[dim - 2] = f"({factor} {mine // other})" if mine > other else factor
    return words


def norm_words(shape: Shape) -> list[str]:
    """The words of the dimensions of space of a norm over them."""
    dim = cut_dim(shape)
    return [HALO if at == dim else fixed(size) for at, size in enumerate(shape) if at > 1]


def mean_words(shape: Shape) -> list[str] | None:
    """The words of the dimensions of space of a mean over all of them; None where it cannot be cut."""
    dim = cut_dim(shape) if len(shape) > 3 else None
    return None if dim is None else [f"{HALO}+" if at == dim else fixed(size) for at, size in enumerate(shape) if at > 1]


def most_ranks(node: Node, shapes: tuple[Shape, ...]) -> int:
    """Ranks whose shards are as large as the halo."""
    found = halo_of(node, shapes)
    if found is None:
        return 1
    rows = shapes[0][found[0]]
    assert isinstance(rows, int)
    return rows // max(found[1])


def halo_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """A message to each neighbour in the forward, and of gradients back in the backward."""
    found = halo_of(node, shapes)
    if found is None:
        return ()
    dim, halo = found
    return tuple(
        OperationCollective(
            "point_to_point", (*shapes[0][:dim], rows, *shapes[0][dim + 1 :]), node.outputs[0].dtype, backward, operand=0
        )
        for backward in (False, True)
        for rows in halo
        if rows
    )


def statistics_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-reduces of sums and of squares, and of two sums in the backward, of each group of channels."""
    groups = node.args[1] if node.op.startswith("aten.group_norm") else shapes[0][1]
    assert isinstance(groups, int)
    each = (shapes[0][0], groups)
    once = OperationCollective("all_reduce", each, "float32", operand=0)
    return once, once, OperationCollective("all_reduce", (2, *each), "float32", True, operand=0)


def _exchanging(name: str) -> tuple[NamedFunction, ...]:
    return (NamedFunction(HALO, name, None, halo_collectives, exclusive=True, most_ranks=most_ranks),)


def _summing(name: str) -> tuple[NamedFunction, ...]:
    return (NamedFunction(HALO, name, None, statistics_collectives, exclusive=True),)


FUNCTIONS: dict[str, tuple[NamedFunction, ...]] = {
    **{f"aten.conv{n}d": _exchanging("ap.convolution_halo") for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": _exchanging("ap.transposed_convolution_halo") for n in (1, 2, 3)},
    **{f"aten.{kind}_pool{n}d": _exchanging(f"ap.{kind}_pool_halo") for n in (1, 2, 3) for kind in ("max", "avg")},
    **{f"aten.upsample_{kind}{n}d": _exchanging("ap.interpolate_halo") for n, kind in ((1, "linear"), (2, "bilinear"),
                                                                                       (3, "trilinear"))},
    **{op: (NamedFunction(HALO, "ap.mean_space"),) for op in ("aten.mean", "aten.mean.dim")},
    **{f"aten.{form}adaptive_avg_pool{n}d": (NamedFunction(HALO, "ap.adaptive_avg_pool_space"),)
       for n in (2, 3) for form in ("", "_")},
    "aten.group_norm": _summing("ap.group_norm_space"),
    "aten.instance_norm": _summing("ap.instance_norm_space"),
}  # fmt: skip
"""Named functions of a cut image."""
