"""Norms: of layers, of groups of channels, of weights; and the mean over a rank's examples."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.images.space import norm_words, summing
from autopar.operations.notation.line_text import dim_argument, dims_argument, except_dims, fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine, argument
from autopar.operations.notation.spelling import function, plain
from autopar.operations.operation import Operation

LAYER_NORM = "aten.layer_norm"


def layer_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``layer_norm rms_norm native_layer_norm(x, normalized_shape, ...)``: all but the normalised dimensions."""
    sizes = node.args[1]
    assert isinstance(sizes, tuple)
    rank = len(shapes[0]) - len(sizes)
    batch = [letter(i) for i in range(rank)]
    operands = [[*batch, *map(fixed, shapes[0][rank:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    results = ([*batch, *(fixed(size) for size in value.shape[rank:])] for value in node.outputs)
    return DerivedLine(line_text(operands, results))


def group_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.group_norm(x, groups, w, b)``: the batch, the groups of channels, and a dimension of space."""
    groups = node.args[1]
    assert isinstance(groups, int)
    x = ["n", "(g c!)", *norm_words(shapes[0])]
    return DerivedLine(line_text([x, *(["(g c!)"] for _ in shapes[1:])], [x]), (("g", groups),))


def instance_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.instance_norm(x, w, b, mean, var, use_input_stats, ...)``: examples, channels, and a dimension of space."""
    if argument(node, 5, "use_input_stats", True) is not True or argument(node, 3, "running_mean") is not None:
        return None
    x = ["n", "c", *norm_words(shapes[0])]
    return DerivedLine(line_text([x, *(["c"] for _ in shapes[1:])], [x]))


def weight_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten._weight_norm(v, g, dim)``: shards the dimension along which the norms are."""
    dim = dim_argument(node, 2, len(shapes[0]))
    return except_dims([other for other in range(len(shapes[0])) if other != dim], node, shapes)


def local_mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``ap.local_mean(x, dims, correction)``: also shards examples, since each one has the mean over those of its rank."""
    dims = dims_argument(node, 1, "dim", len(shapes[0]))
    left = [letter(i) + ("!" if i in dims and i else "") for i in range(len(shapes[0]))]
    return DerivedLine(line_text([left], [["1" if i in dims and i else letter(i) for i in range(len(left))]]))


OPERATIONS = (
    Operation(LAYER_NORM, layer_norm_rule, norm=True, layer=True, named_after_module=True, spelling=plain("F.layer_norm")),
    Operation("aten.native_layer_norm", layer_norm_rule, norm=True),
    Operation("aten.rms_norm", layer_norm_rule, norm=True, layer=True, named_after_module=True, spelling=function("F")),
    Operation(
        "aten.group_norm", group_norm_rule, functions=summing("ap.group_norm_space"), groups_at=1, layer=True,
        spelling=plain("F.group_norm"),
    ),
    Operation("aten.instance_norm", instance_norm_rule, functions=summing("ap.instance_norm_space")),
    Operation("aten._weight_norm", weight_norm_rule),
    Operation("ap.local_mean", local_mean_rule, rank_statistics=True, spelling=function("C")),
)  # fmt: skip
