"""Rules of operations on images and sequences of samples: pooling, padding, sampling, windows."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.compute import first_dims, leading_dims_rule_1d, leading_dims_rule_2d, pad_rule
from autopar.operations.notation.line_text import dim_argument, dims_argument, fixed, letter, line_text
from autopar.operations.notation.rule import Derive, DerivedLine, argument
from autopar.operations.pointwise import reduce_whole_rule
from autopar.operations.space import HALOS, mean_words, norm_words, space_words


def leading_dims_rule_3d(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Three-dimensional pooling and interpolation: all but the last three dimensions."""
    return first_dims(len(shapes[0]) - 3, node, shapes)


def space_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Pooling and interpolation: all dimensions before those of space, and one of these."""
    count = len(shapes[0]) - int(node.op.split(".")[1][-2])
    leading = [letter(index) for index in range(count)]
    if count != 2 or len(node.outputs) > 1:
        return first_dims(count, node, shapes)
    operand, result = space_words(node, shapes)
    return DerivedLine(line_text([[*leading, *operand]], [[*leading, *result]]))


def mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.mean.dim(x, dims, ...)``: all but the reduced dimensions; of the mean of an image one of these too."""
    rank = len(shapes[0])
    dims = dims_argument(node, 1, "dim", rank)
    plain = node.op == "aten.mean.dim" and not node.kwargs and len(node.args) < 4
    words = mean_words(shapes[0]) if plain and sorted(dims) == list(range(2, rank)) else None
    if words is None:
        return reduce_whole_rule(node, shapes)
    return _mean_line(node, shapes, words)


def adaptive_mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``adaptive_avg_pool2d`` and ``3d``: all but the dimensions of space, and one of these where the result has one pixel."""
    count = int(node.op.split(".")[1][-2])
    single = len(shapes[0]) == count + 2 and all(size == 1 for size in node.outputs[0].shape[2:])
    words = mean_words(shapes[0]) if single else None
    return first_dims(len(shapes[0]) - count, node, shapes) if words is None else _mean_line(node, shapes, words)


def _mean_line(node: Node, shapes: tuple[Shape, ...], words: list[str]) -> DerivedLine:
    return DerivedLine(line_text([["n", "c", *words]], [["n", "c", *("1" for _ in node.outputs[0].shape[2:])]]))


def batch_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``im2col col2im``: examples only."""
    return first_dims(1, node, shapes) if len(shapes[0]) == (4 if node.op == "aten.im2col" else 3) else None


def windows_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.unfold(x, dim, size, step)``: all but the unfolded dimension; the window is a further one."""
    rank, result = len(shapes[0]), node.outputs[0].shape
    dim = dim_argument(node, 1, rank)
    names = [letter(i) if i != dim else fixed(size) for i, size in enumerate(shapes[0])]
    windows = [letter(i) if i != dim else fixed(result[dim]) for i in range(rank)]
    return DerivedLine(line_text([names], [[*windows, fixed(result[-1])]]))


def grid_sampler_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.grid_sampler(x, grid)``: examples, channels, and the places that are sampled."""
    spatial = len(shapes[0]) - 2
    places = [f"place{i}" for i in range(spatial)]
    x = ["n", "c", *map(fixed, shapes[0][2:])]
    return DerivedLine(line_text([x, ["n", *places, fixed(spatial)]], [["n", "c", *places]]))


def instance_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.instance_norm(x, w, b, mean, var, use_input_stats, ...)``: examples, channels, and a dimension of space."""
    if argument(node, 5, "use_input_stats", True) is not True or argument(node, 3, "running_mean") is not None:
        return None
    x = ["n", "c", *norm_words(shapes[0])]
    return DerivedLine(line_text([x, *(["c"] for _ in shapes[1:])], [x]))


def diagonal_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.diagonal(x, offset, dim1, dim2)``: the other dimensions."""
    rank = len(shapes[0])
    given = [int(argument(node, at, name, default)) % rank for at, name, default in ((2, "dim1", 0), (3, "dim2", 1))]  # type: ignore[arg-type]
    names = [letter(i) if i not in given else fixed(size) for i, size in enumerate(shapes[0])]
    kept = [letter(i) for i in range(rank) if i not in given]
    return DerivedLine(line_text([names], [[*kept, fixed(node.outputs[0].shape[-1])]]))


IMAGES: dict[str, Derive] = {
    **{op: space_rule for op in HALOS if "conv" not in op},
    **{f"aten.{form}adaptive_avg_pool{n}d": adaptive_mean_rule for n in (2, 3) for form in ("", "_")},
    "aten.adaptive_max_pool3d": leading_dims_rule_3d,
    "aten.max_pool3d_with_indices": leading_dims_rule_3d,
    "aten.adaptive_max_pool2d": leading_dims_rule_2d,
    "aten.adaptive_max_pool1d": leading_dims_rule_1d,
    "aten.max_pool1d_with_indices": leading_dims_rule_1d,
    **{f"aten.{kind}_pad{n}d": pad_rule for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "aten.im2col": batch_rule,
    "aten.col2im": batch_rule,
    "aten.unfold": windows_rule,
    "aten.grid_sampler": grid_sampler_rule,
    "aten.grid_sampler_2d": grid_sampler_rule,
    "aten.grid_sampler_3d": grid_sampler_rule,
    "aten.instance_norm": instance_norm_rule,
    "aten.diagonal": diagonal_rule,
}
