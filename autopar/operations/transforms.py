"""Rules of Fourier transforms, complex numbers, recurrent nets, distances, and writes by index."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Ref
from autopar.operations.notation.line_text import dims_argument, fixed, letter, line_text
from autopar.operations.notation.rule import Derive, DerivedLine


def fourier_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``_fft_r2c _fft_c2r _fft_c2c(x, dims, ...)``: all but the transformed dimensions."""
    dims = dims_argument(node, 1, "dim", len(shapes[0]))

    def terms(shape: Shape) -> list[str]:
        return [fixed(size) if i in dims else letter(i) for i, size in enumerate(shape)]

    return DerivedLine(line_text([terms(shapes[0])], [terms(node.outputs[0].shape)]))


def pair_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``view_as_complex view_as_real``: the pair is never sharded."""
    names = [letter(i) for i in range(min(len(shapes[0]), len(node.outputs[0].shape)))]
    sides = [names, [*names, fixed(2)]]
    left, right = sides if len(shapes[0]) == len(names) else sides[::-1]
    return DerivedLine(line_text([left], [right]))


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


def index_put_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.index_put(x, indices, values)`` whose indexed dimensions come first: the others, where the values have them."""
    given = node.args[1]
    assert isinstance(given, tuple)
    dims = [i for i, item in enumerate(given) if isinstance(item, Ref)]
    if dims != list(range(len(dims))):
        return None
    rank, values = len(shapes[0]), shapes[-1]
    tail = rank - len(dims)
    names = [letter(i) if i >= len(dims) else fixed(size) for i, size in enumerate(shapes[0])]
    own = [fixed(size) for size in values]
    for back in range(1, tail + 1):
        if len(values) >= back and values[-back] == shapes[0][-back]:
            own[-back] = letter(rank - back)
    indices = [list(map(fixed, shape)) for shape in shapes[1:-1]]
    return DerivedLine(line_text([names, *indices, own], [names]))


TRANSFORMS: dict[str, Derive] = {
    **dict.fromkeys(("aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"), fourier_rule),
    **dict.fromkeys(("aten.view_as_complex", "aten.view_as_real"), pair_rule),
    **dict.fromkeys(("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"), recurrent_rule),
    **dict.fromkeys(("aten.index_put", "aten._unsafe_index_put"), index_put_rule),
}

DISTANCES = {
    "aten.cdist": "... m d!, ... n d! -> ... m n",
    "aten._cdist_forward": "... m d!, ... n d! -> ... m n",
    "aten._euclidean_dist": "... m d!, ... n d! -> ... m n",
}
