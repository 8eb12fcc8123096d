"""Operations that compute and whose line depends on arguments: convolutions, pooling, norms, matmul, losses."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node
from autopar.rules.lines import fixed, letter, line
from autopar.rules.pointwise import elementwise
from autopar.rules.rule import Derive, Derived, argument
from autopar.rules.strategy import InnerCollective


def convolution(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``conv1d conv2d conv3d convolution``: batch, channels in (summed) and out; groups of channels with their own kernels."""
    general = node.op == "aten.convolution"
    if general and argument(node, 6, "transposed", False):
        return transposed_convolution(node, shapes)
    groups = argument(node, 8 if general else 6, "groups", 1)
    into, out, within = ("c+", "o", "c+") if groups == 1 else ("(g c!)", "(g o!)", "c!")
    return _convolution(node, shapes, (into, [out, within], out), groups)


def transposed_convolution(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``conv_transpose1d`` to ``3d``: as a convolution, the kernels' first dimension is that of the channels in."""
    groups = argument(node, 8 if node.op == "aten.convolution" else 6, "groups", 1)
    into, out, within = ("c+", "o", "o") if groups == 1 else ("(g c!)", "(g o!)", "o!")
    return _convolution(node, shapes, (into, [into, within], out), groups)


def _convolution(node: Node, shapes: tuple[Shape, ...], channels: tuple[str, list[str], str], groups: Arg) -> Derived:
    """`channels` are the words of the channels in the image, of both dimensions of the kernels, and in the result."""
    assert isinstance(groups, int)
    result = node.outputs[0].shape
    batch = ["n"] if len(shapes[0]) == len(shapes[1]) else []
    x = [*batch, channels[0], *map(fixed, shapes[0][len(batch) + 1 :])]
    weight = [*channels[1], *map(fixed, shapes[1][2:])]
    bias = [[channels[2]] for _ in shapes[2:]]
    known = () if groups == 1 else (("g", groups),)
    return Derived(line([x, weight, *bias], [[*batch, channels[2], *map(fixed, result[len(batch) + 1 :])]]), known)


def layer_norm(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``layer_norm rms_norm native_layer_norm(x, normalized_shape, ...)``: the normalised dimensions are whole."""
    sizes = node.args[1]
    assert isinstance(sizes, tuple)
    rank = len(shapes[0]) - len(sizes)
    batch = [letter(i) for i in range(rank)]
    operands = [[*batch, *map(fixed, shapes[0][rank:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    results = ([*batch, *(fixed(size) for size in value.shape[rank:])] for value in node.outputs)
    return Derived(line(operands, results))


def first_dims(count: int, node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """A map over the first `count` dimensions of the first operand and the results; the other operands whole."""
    kept = [letter(i) for i in range(count)]
    operands = [[*kept, *map(fixed, shapes[0][count:])], *(list(map(fixed, shape)) for shape in shapes[1:])]
    return Derived(line(operands, ([*kept, *map(fixed, value.shape[count:])] for value in node.outputs)))


def group_norm(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.group_norm(x, groups, w, b)``: over the batch and the groups of channels."""
    groups = node.args[1]
    assert isinstance(groups, int)
    x = ["n", "(g c!)", *map(fixed, shapes[0][2:])]
    return Derived(line([x, *(["(g c!)"] for _ in shapes[1:])], [x]), (("g", groups),))


def last_two_whole(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Two-dimensional pooling and interpolation, ``tril triu``: over all leading dimensions."""
    return first_dims(len(shapes[0]) - 2, node, shapes)


def last_whole(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """One-dimensional pooling: over all leading dimensions."""
    return first_dims(len(shapes[0]) - 1, node, shapes)


def pad(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``constant_pad_nd pad``: the padded dimensions whole."""
    amounts = node.args[1]
    assert isinstance(amounts, tuple)
    rank = len(shapes[0])
    padded = {rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    left, right = (
        [letter(i) if i not in padded else fixed(size) for i, size in enumerate(shape)]
        for shape in (shapes[0], node.outputs[0].shape)
    )
    return Derived(line([left], [right]))


def glu(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.glu(x, dim)``: two halves of a dimension."""
    rank = len(shapes[0])
    dim = int(argument(node, 1, "dim", -1)) % rank  # type: ignore[arg-type]
    left = [letter(i) if i != dim else f"(2 {letter(i)})" for i in range(rank)]
    return Derived(line([left], [[letter(i) for i in range(rank)]]))


def einsum(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``aten.einsum(equation, tensors)``: a letter of all operands but not of the result is summed."""
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
    return Derived(line(([name + mark[name] for name in operand] for operand in operands), [list(result)]))


def pointwise_loss(position: int) -> Derive:
    """A deriver for losses that map and then reduce; `position` is the argument ``reduction`` (0 none, 1 mean, 2 sum)."""

    def derive(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
        reduction = argument(node, position, "reduction", 1)
        if reduction == 0:
            return elementwise(node, shapes)
        if reduction != 2 or any(shape != shapes[0] for shape in shapes):
            return None
        terms = [letter(i) + "+" for i in range(len(shapes[0]))]
        return Derived(line([terms] * len(shapes), [[]]))

    return derive


def matmul(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.matmul`` of any ranks."""
    a, b = (len(shape) for shape in shapes)
    left = "k+" if a == 1 else "m k+" if a == 2 else "... m k+"
    right = "k+" if b == 1 else "k+ n" if b == 2 else "... k+ n"
    batch = "..." if max(a, b) > 2 else ""
    result = " ".join(word for word in (batch, "m" if a > 1 else "", "n" if b > 1 else "") if word)
    return Derived(f"{left}, {right} -> {result or '()'}")


def addmm(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.addmm(bias, a, b)``, ``aten.baddbmm``: the bias is added once."""
    batch = ["b"] if node.op.startswith("aten.baddbmm") else []
    names = [*batch, "m", "n"]
    bias = names[len(names) - len(shapes[0]) :]
    return Derived(line([bias, [*batch, "m", "k+"], [*batch, "k+", "n"]], [names]))


def cross_entropy_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[InnerCollective, ...]:
    """The maximum, and three sums a token, in the dtype in which the loss is computed (float32 for half precision)."""
    tokens = shapes[0][:-1]
    dtype = node.outputs[0].dtype
    return InnerCollective("all_reduce", tokens, dtype), InnerCollective("all_reduce", (3, *tokens), dtype)
