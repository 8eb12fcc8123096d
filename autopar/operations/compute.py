"""Rules of operations whose line depends on arguments: convolutions, pooling, norms, matrix products, losses."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node
from autopar.operations.notation.line_text import fixed, letter, line_text
from autopar.operations.notation.rule import Derive, DerivedLine, OperationCollective, argument
from autopar.operations.pointwise import elementwise_rule
from autopar.operations.space import norm_words, space_words


def convolution_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``conv1d conv2d conv3d convolution``: batch, input channels (summed), output channels; with groups, the groups; space."""
    general = node.op == "aten.convolution"
    if general and argument(node, 6, "transposed", False):
        return transposed_convolution_rule(node, shapes)
    groups = argument(node, 8 if general else 6, "groups", 1)
    into, out, within = ("c+", "o", "c+") if groups == 1 else ("(g c!)", "(g o!)", "c!")
    return _convolution(node, shapes, (into, [out, within], out), groups)


def transposed_convolution_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``conv_transpose1d`` to ``3d``: as a convolution, whose weight has the input channels first."""
    groups = argument(node, 8 if node.op == "aten.convolution" else 6, "groups", 1)
    into, out, within = ("c+", "o", "o") if groups == 1 else ("(g c!)", "(g o!)", "o!")
    return _convolution(node, shapes, (into, [into, within], out), groups)


def _convolution(node: Node, shapes: tuple[Shape, ...], channels: tuple[str, list[str], str], groups: Arg) -> DerivedLine:
    """`channels` are the words of the channels of the input, of the first two dimensions of the weight, and of the result."""
    assert isinstance(groups, int)
    result = node.outputs[0].shape
    batch = ["n"] if len(shapes[0]) == len(shapes[1]) else []
    spaces = space_words(node, shapes) if batch else [list(map(fixed, shape[1:])) for shape in (shapes[0], result)]
    x = [*batch, channels[0], *spaces[0]]
    weight = [*channels[1], *map(fixed, shapes[1][2:])]
    bias = [[channels[2]] for _ in shapes[2:]]
    known = () if groups == 1 else (("g", groups),)
    return DerivedLine(line_text([x, weight, *bias], [[*batch, channels[2], *spaces[1]]]), known)


def float8_linear_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``linear_float8_dynamic(x, w, b)``: as ``linear``; shards of the weight have multiples of 16 as sizes (``_scaled_mm``). Not
    linear in Partial operands, which would be rounded by themselves."""
    bias = ", (n o!)" * (len(shapes) > 2)
    return DerivedLine(f"... (k+ i!), (n o!) (k+ i!){bias} -> ... (n o!)", (("i", 16), ("o", 16)))


def layer_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``layer_norm rms_norm native_layer_norm(x, normalized_shape, ...)``: all but the normalised dimensions."""
    sizes = node.args[1]
    assert isinstance(sizes, tuple)
    rank = len(shapes[0]) - len(sizes)
    batch = [letter(i) for i in range(rank)]
    operands = [[*batch, *map(fixed, shapes[0][rank:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    results = ([*batch, *(fixed(size) for size in value.shape[rank:])] for value in node.outputs)
    return DerivedLine(line_text(operands, results))


def first_dims(count: int, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """The first `count` dimensions of the first operand and the results; other operands are never sharded."""
    leading = [letter(i) for i in range(count)]
    operands = [[*leading, *map(fixed, shapes[0][count:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    return DerivedLine(line_text(operands, ([*leading, *map(fixed, value.shape[count:])] for value in node.outputs)))


def group_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.group_norm(x, groups, w, b)``: the batch, the groups of channels, and a dimension of space."""
    groups = node.args[1]
    assert isinstance(groups, int)
    x = ["n", "(g c!)", *norm_words(shapes[0])]
    return DerivedLine(line_text([x, *(["(g c!)"] for _ in shapes[1:])], [x]), (("g", groups),))


def leading_dims_rule_2d(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Two-dimensional pooling and interpolation, ``tril triu``: all but the last two dimensions."""
    return first_dims(len(shapes[0]) - 2, node, shapes)


def leading_dims_rule_1d(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """One-dimensional pooling: all but the last dimension."""
    return first_dims(len(shapes[0]) - 1, node, shapes)


def pad_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``constant_pad_nd pad``: all but the padded dimensions."""
    amounts = node.args[1]
    assert isinstance(amounts, tuple)
    rank = len(shapes[0])
    padded = {rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    left, right = (
        [letter(i) if i not in padded else fixed(size) for i, size in enumerate(shape)]
        for shape in (shapes[0], node.outputs[0].shape)
    )
    return DerivedLine(line_text([left], [right]))


def glu_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.glu(x, dim)``: a dimension is two halves, ``(2 a) -> a``."""
    rank = len(shapes[0])
    dim = int(argument(node, 1, "dim", -1)) % rank  # type: ignore[arg-type]
    left = [letter(i) if i != dim else f"(2 {letter(i)})" for i in range(rank)]
    return DerivedLine(line_text([left], [[letter(i) for i in range(rank)]]))


def einsum_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.einsum(equation, tensors)``: a letter of all operands that is not in the result is summed."""
    equation = str(node.args[0]).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, result = equation.split("->")
    operands = left.split(",")
    mark = {
        name: "" if name in result else "+" if all(name in operand for operand in operands) else "!" for name in set(left) - {","}
    }
    if any(len(set(term)) < len(term) for term in (*operands, result)):
        return None
    return DerivedLine(line_text(([name + mark[name] for name in operand] for operand in operands), [list(result)]))


def pointwise_loss_rule(position: int) -> Derive:
    """Writes the line of an elementwise loss with a reduction; argument `position` is ``reduction`` (0 none, 1 mean, 2 sum)."""

    def derive(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
        reduction = argument(node, position, "reduction", 1)
        if reduction == 0:
            return elementwise_rule(node, shapes)
        if reduction != 2 or any(shape != shapes[0] for shape in shapes):
            return None
        terms = [letter(i) + "+" for i in range(len(shapes[0]))]
        return DerivedLine(line_text([terms] * len(shapes), [[]]))

    return derive


def matmul_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.matmul`` of any ranks."""
    a, b = (len(shape) for shape in shapes)
    left = "k+" if a == 1 else "m k+" if a == 2 else "... m k+"
    right = "k+" if b == 1 else "k+ n" if b == 2 else "... k+ n"
    batch = "..." if max(a, b) > 2 else ""
    result = " ".join(word for word in (batch, "m" if a > 1 else "", "n" if b > 1 else "") if word)
    return DerivedLine(f"{left}, {right} -> {result or '()'}")


def addmm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.addmm(bias, a, b)``, ``aten.baddbmm``: the bias is an addend."""
    batch = ["b"] if node.op.startswith("aten.baddbmm") else []
    names = [*batch, "m", "n"]
    bias = names[len(names) - len(shapes[0]) :]
    return DerivedLine(line_text([bias, [*batch, "m", "k+"], [*batch, "k+", "n"]], [names]))


def cross_entropy_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-reduces of one maximum and of three sums per token, in the dtype of the loss (float32 for half precision)."""
    tokens = shapes[0][:-1]
    dtype = node.outputs[0].dtype
    return OperationCollective("all_reduce", tokens, dtype), OperationCollective("all_reduce", (3, *tokens), dtype)
