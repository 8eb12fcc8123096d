"""Matrix products: of a weight, of batches, of tensors that an equation names; distances between rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.line_text import line_text
from autopar.operations.notation.rule import DerivedLine
from autopar.operations.notation.spelling import function, method
from autopar.operations.operation import Operation, Sizes, several

EINSUM, LINEAR, LINEAR_FLOAT8 = "aten.einsum", "aten.linear", "ap.linear_float8_dynamic"
PUBLISHED_FLOAT8 = "ap.linear_float8"


def float8_linear_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``linear_float8_dynamic(x, w, b)``: as ``linear``; shards of the weight have multiples of 16 as sizes (``_scaled_mm``). Not
    linear in Partial operands, which would be rounded by themselves."""
    bias = ", (n o!)" * (len(shapes) > 2)
    return DerivedLine(f"... (k+ i!), (n o!) (k+ i!){bias} -> ... (n o!)", (("i", 16), ("o", 16)))


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


def dequantize_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``dequantize_4bit(packed, absmax, ...)``: two elements a byte, and one scale for each block of a row."""
    return DerivedLine("n (b p!), n b -> n (b k!)")


def _flops(left: int, node: Node, a: Sequence[Sizes], out: Sequence[Sizes]) -> float:
    return 2.0 * prod(out[0]) * a[left][-1]


_FLOPS, _SUM_FLOPS = partial(_flops, 0), partial(_flops, 1)


OPERATIONS = (
    Operation(
        LINEAR, "... k+, n k+, n -> ... n", flops=_FLOPS, product=True, linear=True, layer=True, named_after_module=True,
        splits_backward=True, spelling=function("F"),
    ),
    Operation(
        "ap.linear_kn", "... k+, k+ n, n -> ... n", flops=_FLOPS, product=True, linear=True, layer=True,
        named_after_module=True, splits_backward=True, spelling=function("C"),
    ),
    Operation(
        LINEAR_FLOAT8, float8_linear_rule, flops=_FLOPS, product=True, linear=True, float8=True, scaled=True,
        spelling=function("C"),
    ),
    Operation(
        PUBLISHED_FLOAT8, "... k+, n k+, n -> ... n", flops=_FLOPS, product=True, linear=True, float8=True, published=True
    ),
    Operation("bitsandbytes.dequantize_4bit", dequantize_rule, sizes_at=4),
    Operation("aten.mm", "m k+, k+ n -> m n", flops=_FLOPS, product=True, spelling=method),
    Operation("aten.bmm", "b m k+, b k+ n -> b m n", flops=_FLOPS, product=True, batched=True, spelling=method),
    Operation("aten.matmul", matmul_rule, flops=_FLOPS, product=True, batched=True, spelling=method),
    Operation("aten.addmm", addmm_rule, flops=_SUM_FLOPS, product=True, left=1, spelling=function("torch")),
    Operation("aten.baddbmm", addmm_rule, flops=_SUM_FLOPS, product=True, left=1, batched=True, spelling=function("torch")),
    Operation("aten.mv", "m k+, k+ -> m"),
    Operation("aten.dot", "k+, k+ -> ()"),
    Operation("aten.vdot", "k+, k+ -> ()"),
    Operation("aten.outer", spelling=function("torch")),
    Operation(EINSUM, einsum_rule),
    *several(Operation("aten", "... m d!, ... n d! -> ... m n"), "cdist _cdist_forward _euclidean_dist"),
)  # fmt: skip
