"""Rules of elementwise operations, reductions, operations along one dimension, indexing and factories."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Ref
from autopar.operations.notation.line_text import dim_argument, dims_argument, fixed, letter, line_text
from autopar.operations.notation.rule import DerivedLine, argument


def elementwise_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Every dimension of the result is a factor; operands broadcast from the right."""
    rank = max(len(value.shape) for value in node.outputs)
    result = node.outputs[0].shape

    def terms(shape: Shape) -> list[str]:
        offset = rank - len(shape)
        return [letter(i + offset) if size == result[i + offset] else fixed(size) for i, size in enumerate(shape)]

    return DerivedLine(line_text(map(terms, shapes), (terms(value.shape) for value in node.outputs)))


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
    position = 2 if node.op.startswith("aten.linalg_vector_norm") else 1
    return _reduced(node, shapes, dims_argument(node, position, "dim", len(shapes[0])), "!")


def local_mean_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``ap.local_mean(x, dims, correction)``: also shards examples, since each one has the mean over those of its rank."""
    dims = dims_argument(node, 1, "dim", len(shapes[0]))
    left = [letter(i) + ("!" if i in dims and i else "") for i in range(len(shapes[0]))]
    return DerivedLine(line_text([left], [["1" if i in dims and i else letter(i) for i in range(len(left))]]))


def along_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Operations along one dimension, which is never sharded; results of the same rank: ``softmax cumsum topk sort``."""
    rank = len(shapes[0])
    position = 2 if node.op.startswith(("aten.topk", "aten.diff")) else 1
    dim = dim_argument(node, position, rank, -1)

    def terms(shape: Shape) -> list[str]:
        return [fixed(size) if i == dim else letter(i) for i, size in enumerate(shape)]

    return DerivedLine(line_text(map(terms, shapes), (terms(value.shape) for value in node.outputs)))


def weight_norm_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten._weight_norm(v, g, dim)``: shards the dimension along which the norms are."""
    dim = dim_argument(node, 2, len(shapes[0]))
    terms = [letter(i) if i == dim else fixed(size) for i, size in enumerate(shapes[0])]
    lengths = [letter(i) if i == dim else fixed(size) for i, size in enumerate(shapes[1])]
    return DerivedLine(line_text([terms, lengths], [terms]))


def _some_whole(node: Node, shapes: tuple[Shape, ...], dims: Sequence[int]) -> DerivedLine:
    terms = [fixed(size) if i in dims else letter(i) for i, size in enumerate(shapes[0])]
    return DerivedLine(line_text([terms], [terms]))


def flip_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.flip(x, dims)``."""
    return _some_whole(node, shapes, dims_argument(node, 1, "dims", len(shapes[0])))


def roll_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.roll(x, shifts, dims)``."""
    return _some_whole(node, shapes, dims_argument(node, 2, "dims", len(shapes[0])))


def factory_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """Constants of a given shape (``zeros full new_ones``): shards every dimension; operands only lend their dtype."""
    names = [letter(i) for i in range(len(node.outputs[0].shape))]
    return DerivedLine(line_text((map(fixed, shape) for shape in shapes), [names]))


def unsharded_factory_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``arange``, ``scalar_tensor``: never sharded."""
    return DerivedLine(line_text((map(fixed, shape) for shape in shapes), (map(fixed, value.shape) for value in node.outputs)))


def slice_scatter_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.slice_scatter(x, part, dim, ...)``, ``aten.select_scatter(x, part, dim, index)``: all but the written dimension."""
    rank = len(shapes[0])
    dim = dim_argument(node, 2, rank)
    whole = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    written = [letter(i) for i in range(rank) if i != dim]
    if len(shapes[1]) == rank:
        written.insert(dim, fixed(shapes[1][dim]))
    return DerivedLine(line_text([whole, written], [whole]))


def scatter_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.scatter(x, dim, index, source or number)``: the dimensions of equal size, but the written one."""
    return _scatter(node, shapes, "")


def scatter_add_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.scatter_add(x, dim, index, source)``: as scatter; the dimension of the source is summed."""
    return _scatter(node, shapes, "z+")


def _scatter(node: Node, shapes: tuple[Shape, ...], along: str) -> DerivedLine:
    rank = len(shapes[0])
    dim = dim_argument(node, 1, rank)
    agree = [i != dim and all(shape[i] == shapes[0][i] for shape in shapes) for i in range(rank)]
    along = along if all(shape[dim] == shapes[1][dim] for shape in shapes[1:]) else ""
    whole = [letter(i) if agree[i] else fixed(size) for i, size in enumerate(shapes[0])]
    written = [
        [letter(i) if agree[i] else along if i == dim and along else fixed(size) for i, size in enumerate(shape)]
        for shape in shapes[1:]
    ]
    return DerivedLine(line_text([whole, *written], [whole]), addends=(0,) if along else None)


def index_add_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.index_add(x, dim, index, source)``: the dimension of the source is summed."""
    rank = len(shapes[0])
    dim = dim_argument(node, 1, rank)
    whole = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    added = ["z+" if i == dim else letter(i) for i in range(rank)]
    return DerivedLine(line_text([whole, ["z+"], added], [whole]), addends=(0,))


def histogram_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.histc(x, bins, min, max)`` with given bounds: counts of shards are summed."""
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return None  # the bounds are those of the data
    return DerivedLine(line_text([[f"{letter(i)}+" for i in range(len(shapes[0]))]], [[fixed(node.outputs[0].shape[0])]]))


def gather_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.gather(x, dim, index)``: the dimensions of equal size, but the gathered one."""
    rank = len(shapes[0])
    dim = dim_argument(node, 1, rank)
    agree = [i != dim and shapes[0][i] == shapes[1][i] for i in range(rank)]
    left = [letter(i) if agree[i] else fixed(size) for i, size in enumerate(shapes[0])]
    index = [letter(i) if agree[i] or i == dim else fixed(size) for i, size in enumerate(shapes[1])]
    return DerivedLine(line_text([left, index], [index]))


def index_select_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.index_select(x, dim, index)``: all but the indexed dimension of x, and the index."""
    rank = len(shapes[0])
    dim = dim_argument(node, 1, rank)
    left = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    return DerivedLine(line_text([left, [letter(dim)]], [[letter(i) for i in range(rank)]]))


def index_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.index.Tensor(x, indices)`` with adjacent integer indices: all but the indexed dimensions."""
    given = node.args[1]
    assert isinstance(given, tuple)
    dims = [i for i, item in enumerate(given) if isinstance(item, Ref)]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        return None
    rank, result = len(shapes[0]), node.outputs[0].shape
    broadcast = len(result) - (rank - len(dims))
    if any(len(shape) > broadcast for shape in shapes[1:]):
        return None
    names = [letter(i) for i in range(len(result))]
    middle = names[dims[0] : dims[0] + broadcast]
    extent = result[dims[0] : dims[0] + broadcast]
    outer = shapes[0][: dims[0]] + shapes[0][dims[-1] + 1 :]
    if outer != result[: dims[0]] + result[dims[0] + broadcast :]:
        return None
    remaining = iter([*names[: dims[0]], *names[dims[0] + broadcast :]])
    left = [fixed(size) if i in dims else next(remaining) for i, size in enumerate(shapes[0])]
    operands = [left]
    for shape in shapes[1:]:
        offset = broadcast - len(shape)
        operands.append([middle[i + offset] if size == extent[i + offset] else fixed(size) for i, size in enumerate(shape)])
    return DerivedLine(line_text(operands, [names]))
