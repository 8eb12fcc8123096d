"""Fourier transforms, and recurrent nets."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.line_text import dims_argument, except_dims, fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine
from autopar.operations.operation import Operation, several


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


OPERATIONS = (
    *several(Operation("aten", fourier_rule), "_fft_r2c _fft_c2r _fft_c2c"),
    *several(Operation("aten", recurrent_rule), "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
)
