"""Reductions, and operations along one dimension, Fourier transforms and recurrent nets among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.ir.placement import Invariant
from autopar.operations.images.space import HALO, SPACE, mean_line, mean_words
from autopar.operations.notation.line_text import dim_argument, dims_argument, except_dims, fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective, argument
from autopar.operations.notation.spelling import method, softmax
from autopar.operations.operation import Operation, several
from autopar.operations.pointwise import FIRST, elementwise_rule


def fourier_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``_fft_r2c _fft_c2r _fft_c2c(x, dims, ...)``: all but the transformed dimensions."""
    return except_dims(dims_argument(node, 1, "dim", len(shapes[0])), node, shapes)


def recurrent_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``lstm.input gru.input rnn_tanh.input rnn_relu.input``: examples."""
    if len(shapes[0]) != 3:
        return None
    states = len(node.outputs) - 1
    at = 0 if node.args[8] else 1

    def terms(shape: Shape, batch: int) -> list[str]:
        return [letter(0) if i == batch else fixed(size) for i, size in enumerate(shape)]

    operands = [terms(shapes[0], at), *(terms(shape, 1) for shape in shapes[1 : 1 + states])]
    operands += [list(map(fixed, shape)) for shape in shapes[1 + states :]]
    results = [terms(node.outputs[0].shape, at), *(terms(value.shape, 1) for value in node.outputs[1:])]
    return DerivedLine(line_text(operands, results))


def _reduced(node: Node, shapes: tuple[Shape, ...], dims: Sequence[int], mark: str) -> DerivedLine:
    rank = len(shapes[0])
    left = [letter(i) + mark if i in dims else letter(i) for i in range(rank)]
    results = []
    for value in node.outputs:
        keep = len(value.shape) == rank
        results.append(["1" if i in dims else letter(i) for i in range(rank) if keep or i not in dims])
    return DerivedLine(line_text([left], results))


def reduce_sum_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.sum``, ``aten.sum.dim_IntList``: Partial where a reduced dimension is sharded."""
    return _reduced(node, shapes, dims_argument(node, 1, "dim", len(shapes[0])), "+")


def reduce_whole_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Reductions whose reduced dimension is never sharded: ``mean.dim amax amin var argmax prod max.dim``."""
    if len(shapes) > 1:  # aten.max.other
        return elementwise_rule(node, shapes)
    position = 2 if node.op.startswith(("aten.linalg_vector_norm", "aten.norm")) else 1
    return _reduced(node, shapes, dims_argument(node, position, "dim", len(shapes[0])), "!")


def logsumexp_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.logsumexp(x, dims)``: all but the reduced dimensions, of which a function shards the last one."""
    if _reduces_last(node, shapes):
        return DerivedLine(f"... v! -> ...{' 1' * (len(node.outputs[0].shape) == len(shapes[0]))}")
    return reduce_whole_rule(node, shapes)


def _reduces_last(node: Node, shapes: tuple[Shape, ...]) -> bool:
    rank = len(shapes[0])
    return list(dims_argument(node, 1, "dim", rank)) == [rank - 1]


def logsumexp_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-reduces of a maximum and of a sum for each row."""
    return (OperationCollective("all_reduce", shapes[0][:-1], sum_dtype(node)),) * 2


def sum_dtype(node: Node) -> str:
    """Return the dtype in which ranks add up parts of a result: its own, float32 for half precision."""
    dtype = node.outputs[0].dtype
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.mean.dim(x, dims, ...)``: all but the reduced dimensions; of the mean of an image one of these too."""
    rank = len(shapes[0])
    dims = dims_argument(node, 1, "dim", rank)
    plain = node.op == "aten.mean.dim" and not node.kwargs and len(node.args) < 4
    words = mean_words(shapes[0]) if plain and sorted(dims) == list(range(2, rank)) else None
    if words is None:
        return reduce_whole_rule(node, shapes)
    return mean_line(node, words)


def along_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Operations along one dimension, which is never sharded; results of the same rank: ``softmax cumsum topk sort``."""
    position = 2 if node.op.startswith(("aten.topk", "aten.diff")) else 1
    return except_dims({dim_argument(node, position, len(shapes[0]), -1)}, node, shapes)


def histogram_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.histc(x, bins, min, max)`` with given bounds: counts of shards are summed."""
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return None  # the bounds are those of the data
    return DerivedLine(line_text([[f"{letter(i)}+" for i in range(len(shapes[0]))]], [[fixed(node.outputs[0].shape[0])]]))


_MEAN = Operation("aten.mean", mean_rule, functions=(NamedFunction(HALO, "ap.mean_space", at=SPACE),), spelling=method)

OPERATIONS = (
    Operation("aten.sum", reduce_sum_rule, FIRST, spelling=method),
    _MEAN,
    replace(_MEAN, name="aten.mean.dim", linear_in=FIRST),
    *several(
        Operation("aten", reduce_whole_rule, spelling=method), "amax amin max min var std argmax argmin any all"
    ),
    Operation(
        "aten.logsumexp", logsumexp_rule, transcendental=True, spelling=method,
        functions=(
            NamedFunction("v", "ap.logsumexp_sharded", Invariant(), logsumexp_collectives, applies=_reduces_last, uneven=True),
        ),
    ),
    *several(Operation("aten", reduce_whole_rule), "prod linalg_vector_norm"),
    Operation("aten.norm", reduce_whole_rule, spelling=method),
    *several(Operation("aten", along_rule, transcendental=True, spelling=method), "softmax log_softmax"),
    Operation("aten._softmax", along_rule, spelling=softmax),
    Operation("aten._log_softmax", along_rule, spelling=softmax),
    *several(Operation("aten", along_rule, spelling=method), "cumsum topk sort"),
    *several(Operation("aten", along_rule), "cumprod argsort diff"),
    Operation("aten.histc", histogram_rule, spelling=lambda call: f"C.histogram({call.listed()})"),
    *several(Operation("aten", fourier_rule), "_fft_r2c _fft_c2r _fft_c2c"),
    *several(Operation("aten", recurrent_rule), "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
)
