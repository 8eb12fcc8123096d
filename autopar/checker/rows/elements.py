"""Rows of operations on elements: pointwise, reductions along dimensions, factories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.checker.rows.carry import Dims, OperationRow, plain
from autopar.checker.rows.operation_call import WholeCall
from autopar.checker.shards import Shape

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
Rows = dict[str, Callable[[WholeCall], OperationRow]]


def aten(names: str, row: Callable[[WholeCall], OperationRow]) -> Rows:
    """Operations that have a row in common."""
    return {f"aten.{name}": row for name in names.split()}


def letters(shape: Shape, prefix: str = "d", without: Sequence[int] = ()) -> Dims:
    """A factor for each dimension, but for those that are never cut."""
    return plain([("" if i in without else f"{prefix}{i}") for i in range(len(shape))], shape)


def pointwise(call: WholeCall, linear: tuple[tuple[int, ...], ...] = ()) -> OperationRow:
    """Operands broadcast from the right. A repeated element is whole on every rank."""
    result = max(call.results, key=len)
    operands = tuple(aligned(shape, result) for shape in call.shapes)
    read = {factor for dims in operands for dim in dims for factor, _ in dim}
    new = frozenset(f"d{i}" for i in range(len(result))) - read
    return OperationRow(operands, tuple(aligned(shape, result) for shape in call.results), linear=linear, new=new)


def aligned(shape: Shape, whole: Shape) -> Dims:
    """The factors of an operand that broadcasts to `whole`."""
    offset = len(whole) - len(shape)
    return plain([f"d{i + offset}" if size == whole[i + offset] else "" for i, size in enumerate(shape)], shape)


def _linear_pointwise(groups: Callable[[WholeCall], tuple[tuple[int, ...], ...]]) -> Callable[[WholeCall], OperationRow]:
    return lambda call: pointwise(call, groups(call))


def _sum_of_two(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    return ((0, 1),) if len(call.shapes) == 2 else ()


def _product(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    return ((0,), (1,)) if len(call.shapes) == 2 else ((0,),)


def _quotient(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    number_first = "self" in call.arguments and not hasattr(call.arguments["self"], "name")
    return () if call.get("rounding_mode") or number_first else ((0,),)


def _cast(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    """Summands are cast one by one: not to a narrower dtype, where each would be rounded."""
    source, target = WIDTHS.get(call.dtypes[0], 99), WIDTHS.get(call.result_dtypes[0], 0)
    return ((0,),) if target >= source else ()


def _either(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    """Of two tensors, whatever each element is taken from; the condition is whole."""
    return ((1, 2),) if len(call.shapes) == 3 else ()


def _first(call: WholeCall) -> tuple[tuple[int, ...], ...]:
    return ((0,),)


def reduction(kind: str, linear: bool = False, argument: str = "dim") -> Callable[[WholeCall], OperationRow]:
    """`kind` is how shards are put together; empty: the reduced dimensions are whole."""

    def row(call: WholeCall) -> OperationRow:
        dims = call.dims(argument)
        rank = len(call.shapes[0])
        names = [("" if i in dims and not kind else f"d{i}") for i in range(rank)]
        results = []
        for shape in call.results:
            remaining = [i for i in range(rank) if len(shape) == rank or i not in dims]
            results.append(plain(["" if i in dims else names[i] for i in remaining], shape))
        reduced = {names[i]: kind for i in dims} if kind else {}
        return OperationRow((plain(names, call.shapes[0]),), tuple(results), reduced, ((0,),) if linear else ())

    return row


def max_or_min(call: WholeCall) -> OperationRow:
    return pointwise(call) if len(call.shapes) == 2 else reduction("")(call)


def along(default: int = -1, argument: str = "dim", linear: bool = False) -> Callable[[WholeCall], OperationRow]:
    """Along one dimension, which is whole."""

    def row(call: WholeCall) -> OperationRow:
        dim = call.dim(argument, default)
        sides = [tuple(letters(shape, without=(dim,)) for shape in side) for side in (call.shapes, call.results)]
        return OperationRow(sides[0], sides[1], linear=((0,),) if linear else ())

    return row


def without(dims: Callable[[WholeCall], Sequence[int]], linear: bool = False) -> Callable[[WholeCall], OperationRow]:
    """All dimensions of the first operand but some; other operands are whole."""

    def row(call: WholeCall) -> OperationRow:
        whole = tuple(each % len(call.shapes[0]) for each in dims(call))
        operands = (letters(call.shapes[0], without=whole), *(never(shape) for shape in call.shapes[1:]))
        return OperationRow(
            operands, tuple(letters(shape, without=whole) for shape in call.results), linear=((0,),) if linear else ()
        )

    return row


def never(shape: Shape) -> Dims:
    return plain([""] * len(shape), shape)


def redundant(call: WholeCall) -> OperationRow:
    """Every rank computes it whole."""
    return OperationRow(tuple(map(never, call.shapes)), tuple(map(never, call.results)))


def padded(call: WholeCall) -> OperationRow:
    amounts = call.get("pad", call.get("padding", ()))
    rank = len(call.shapes[0])
    whole = [rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0]
    zeros = (
        call.op in ("aten.pad", "aten.constant_pad_nd")
        and call.get("mode", "constant") == "constant"
        and not call.get("value", 0)
    )
    return without(lambda _: whole, linear=zeros)(call)


def histogram(call: WholeCall) -> OperationRow:
    """``histc`` within given bounds: counts add up. Else the bounds are those of the data."""
    if call.get("min", 0) == call.get("max", 0):
        return redundant(call)
    dims = letters(call.shapes[0])
    return OperationRow((dims,), (never(call.results[0]),), {f"d{i}": "sum" for i in range(len(dims))})


def factory(call: WholeCall) -> OperationRow:
    """Tensors of one number: any axis may cut them. An operand only lends its dtype."""
    return OperationRow(tuple(map(never, call.shapes)), (letters(call.results[0]),), new=frozenset(f"d{i}" for i in range(9)))


def pointwise_loss(call: WholeCall) -> OperationRow:
    reduction_number = call.get("reduction", 1)
    if reduction_number == 0:
        return pointwise(call)
    if reduction_number == 1 or call.shapes[0] != call.shapes[1]:
        return redundant(call)
    operands = tuple(aligned(shape, call.shapes[0]) for shape in call.shapes)
    return OperationRow(operands, ((),), {f"d{i}": "sum" for i in range(len(call.shapes[0]))})


def rotary_embedding(call: WholeCall) -> OperationRow:
    """A linear function of the first operand, in pairs along the last dimension, which is whole."""
    rotated = pointwise(call, ((0,),))
    operands = tuple((*dims[:-1], (("", shape[-1]),)) for dims, shape in zip(rotated.operands, call.shapes, strict=True))
    return replace(rotated, operands=operands, results=operands[:1])


_POINTWISE = """
pow remainder eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor type_as rsqrt sqrt cos sin abs square reciprocal
masked_fill clamp clamp_min clamp_max logical_not bitwise_not floor ceil round sign isnan isinf exp log tanh
sigmoid erf relu relu6 mish softplus hardswish hardsigmoid leaky_relu gelu silu elu maximum minimum
logical_and logical_or logical_xor full_like zeros_like ones_like empty_like nan_to_num floor_divide acos acosh
addcdiv addcmul asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift celu copysign cosh erfc exp2
expm1 fmod hardtanh isfinite lerp log10 log1p log2 log_sigmoid logit selu sinh tan trunc xlogy polar complex real
imag angle _conj resolve_conj conj_physical sgn sinc hypot digamma lgamma erfinv i0 signbit nextafter logaddexp logaddexp2 frac
rad2deg deg2rad threshold positive _prelu_kernel rsub fill
"""

ROWS: Rows = {
    **aten(_POINTWISE, pointwise),
    **dict.fromkeys(("aten.add", "aten.sub"), _linear_pointwise(_sum_of_two)),
    "aten.mul": _linear_pointwise(_product),
    "aten.where": _linear_pointwise(_either),
    "aten.div": _linear_pointwise(_quotient),
    **aten("neg clone alias expand detach", _linear_pointwise(_first)),
    **aten("to _to_copy", _linear_pointwise(_cast)),
    "aten.sum": reduction("sum", linear=True),
    "aten.mean": reduction("", linear=True),
    **aten("var std argmax argmin any all logsumexp prod linalg_vector_norm norm amax amin", reduction("")),
    **dict.fromkeys(("aten.max", "aten.min"), max_or_min),
    **aten("softmax log_softmax topk sort argsort cumprod", along()),
    "aten.cumsum": along(linear=True),
    "aten.diff": along(linear=True),
    "aten.flip": without(lambda call: call.dims("dims"), linear=True),
    "aten.roll": without(lambda call: call.dims("dims"), linear=True),
    **aten("pad constant_pad_nd", padded),
    **{f"aten.{kind}_pad{n}d": padded for kind in ("reflection", "replication") for n in (1, 2, 3)},
    **aten("tril triu", without(lambda _: (-2, -1), linear=True)),
    **aten("zeros ones full empty new_zeros new_ones new_full new_empty", factory),
    **aten("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", pointwise_loss),
    **aten("binary_cross_entropy binary_cross_entropy_with_logits", pointwise_loss),
    **aten("_fft_r2c _fft_c2r _fft_c2c", without(lambda call: call.dims("dim"), linear=True)),
    "aten.histc": histogram,
    "ap.dropout": pointwise,
    "ap.random": pointwise,
    "ap.rotary_embedding": rotary_embedding,
}  # fmt: skip
