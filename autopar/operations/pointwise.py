"""Elementwise operations, and casts."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.line_text import fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine, argument
from autopar.operations.notation.spelling import OperationCall, function, infix, method, operand
from autopar.operations.operation import Operation, several

CAST, CLONE, MULTIPLY, RELU = "aten.to.dtype", "aten.clone", "aten.mul.Tensor", "aten.relu"
ROTARY_EMBEDDING = "ap.rotary_embedding"
VIEW_BITS = "aten.view.dtype"
FIRST = ((0,),)
"""Linear in the first operand."""


def elementwise_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Every dimension of the result is a factor; operands broadcast from the right."""
    result = node.outputs[0].shape
    results = (value.shape for value in node.outputs)
    return DerivedLine(line_text(*((broadcast_terms(shape, result) for shape in side) for side in (shapes, results))))


def broadcast_terms(shape: Shape, whole: Shape) -> list[str]:
    """The factor of each dimension of an operand that broadcasts from the right to `whole`."""
    offset = len(whole) - len(shape)
    return [letter(i + offset) if size == whole[i + offset] else fixed(size) for i, size in enumerate(shape)]


def view_bits_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``x.view(dtype)``: the last dimension is whole where elements of another size change it."""
    before, after = shapes[0], node.outputs[0].shape
    sides = [[letter(i) if a == b else fixed(side[i]) for i, (a, b) in enumerate(zip(before, after, strict=True))]
             for side in (before, after)]  # fmt: skip
    return DerivedLine(line_text(sides[:1], sides[1:]))


def glu_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.glu(x, dim)``: a dimension is two halves, ``(2 a) -> a``."""
    rank = len(shapes[0])
    dim = int(argument(node, 1, "dim", -1)) % rank  # type: ignore[arg-type]
    left = [letter(i) if i != dim else f"(2 {letter(i)})" for i in range(rank)]
    return DerivedLine(line_text([left], [[letter(i) for i in range(rank)]]))


def rotary_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``ap.rotary_embedding(x, cos, sin)``: as elementwise, but for the last dimension, in which pairs are rotated."""
    rank = len(shapes[0])

    def terms(shape: Shape) -> list[str]:
        offset = rank - len(shape)
        own = range(len(shape) - 1)
        return [letter(i + offset) if shape[i] == shapes[0][i + offset] else fixed(shape[i]) for i in own] + [fixed(shape[-1])]

    return DerivedLine(line_text(map(terms, shapes), [terms(shapes[0])]))


def _reversed(call: OperationCall) -> str | None:
    return f"{operand(call.args[1])} - {operand(call.args[0])}" if len(call.args) == 2 and not call.kwargs else None


_INFIX = {
    "%": "remainder", "==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge",
    "&": "bitwise_and __and__", "|": "bitwise_or __or__", "^": "bitwise_xor",
}  # fmt: skip
_DIV = Operation("aten.div", elementwise_rule, spelling=infix("/"))
_TO = Operation("aten.to", elementwise_rule, may_share=True, spelling=method)

OPERATIONS = (
    Operation("aten.add", elementwise_rule, ((0, 1),), sum=True, spelling=infix("+")),
    Operation("aten.sub", elementwise_rule, ((0, 1),), sum=True, spelling=infix("-")),
    Operation("aten.mul", elementwise_rule, ((0,), (1,)), spelling=infix("*")),
    _DIV,
    *(replace(_DIV, name=name, linear_in=("first",)) for name in ("aten.div.Tensor", "aten.div.Scalar")),
    Operation("aten.true_divide", elementwise_rule, spelling=_DIV.spelling),
    Operation("aten.rsub", elementwise_rule, spelling=_reversed),
    Operation("aten.neg", elementwise_rule, FIRST, spelling=lambda call: f"-{operand(call.args[0])}"),
    Operation("aten.pow", elementwise_rule, transcendental=True, spelling=infix("**")),
    *(
        Operation(f"aten.{name}", elementwise_rule, spelling=infix(symbol))
        for symbol, names in _INFIX.items()
        for name in names.split()
    ),
    Operation(CLONE, elementwise_rule, FIRST, spelling=method),
    _TO,
    replace(_TO, name=CAST, linear_in=FIRST),
    *several(
        Operation("aten", elementwise_rule, spelling=method),
        """type_as rsqrt sqrt cos sin abs square reciprocal masked_fill clamp clamp_min clamp_max logical_not bitwise_not floor
        ceil round sign isnan isinf""",
    ),
    *several(Operation("aten", elementwise_rule, transcendental=True, spelling=method), "exp log tanh sigmoid erf"),
    *several(
        Operation("aten", elementwise_rule, spelling=function("F")), "relu relu6 mish softplus hardswish hardsigmoid leaky_relu"
    ),
    *several(Operation("aten", elementwise_rule, transcendental=True, spelling=function("F")), "gelu silu elu"),
    Operation("aten.where", elementwise_rule, ((1, 2),), spelling=function("torch")),
    *several(
        Operation("aten", elementwise_rule, spelling=function("torch")),
        """maximum minimum logical_and logical_or logical_xor full_like zeros_like ones_like empty_like nan_to_num
        floor_divide""",
    ),
    *several(
        Operation("aten", elementwise_rule),
        """_to_copy __xor__ acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift celu
        copy copysign cosh erfc exp2 expm1 fmod hardtanh isfinite lerp log10 log1p log2 log_sigmoid logit selu sinh tan trunc
        xlogy fill polar complex real imag angle _conj resolve_conj conj_physical sgn sinc hypot digamma lgamma erfinv i0 signbit
        nextafter logaddexp logaddexp2 frac rad2deg deg2rad threshold positive _prelu_kernel""",
    ),
    *several(Operation("aten", spelling=method), "contiguous float"),
    Operation(VIEW_BITS, view_bits_rule, view=True),
    Operation(ROTARY_EMBEDDING, rotary_rule, FIRST, kernels=(5, 5), spelling=function("C")),
    Operation("aten.glu", glu_rule, spelling=function("F")),
)
