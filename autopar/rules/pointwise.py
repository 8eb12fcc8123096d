"""Elementwise operations, reductions, operations along one dimension, indexing and factories."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dims import Shape
from autopar.ir.graph import Node, Ref
from autopar.rules.lines import dimension, fixed, integers, letter, line
from autopar.rules.rule import Derived, argument


def elementwise(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Every dimension of the result is a factor; operands broadcast from the right."""
    rank = max(len(value.shape) for value in node.outputs)
    result = node.outputs[0].shape

    def terms(shape: Shape) -> list[str]:
        offset = rank - len(shape)
        return [letter(i + offset) if size == result[i + offset] else fixed(size) for i, size in enumerate(shape)]

    return Derived(line(map(terms, shapes), (terms(value.shape) for value in node.outputs)))


def _reduced(node: Node, shapes: tuple[Shape, ...], dims: Sequence[int], mark: str) -> Derived:
    rank = len(shapes[0])
    left = [letter(i) + mark if i in dims else letter(i) for i in range(rank)]
    results = []
    for value in node.outputs:
        keep = len(value.shape) == rank
        results.append(["1" if i in dims else letter(i) for i in range(rank) if keep or i not in dims])
    return Derived(line([left], results))


def reduce_sum(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.sum``, ``aten.sum.dim_IntList``: Partial where a reduced dimension is sharded."""
    return _reduced(node, shapes, integers(node, 1, "dim", len(shapes[0])), "+")


def reduce_whole(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Reductions that need the whole dimension: ``mean.dim amax amin var argmax prod max.dim``."""
    if len(shapes) > 1:  # aten.max.other
        return elementwise(node, shapes)
    position = 2 if node.op.startswith("aten.linalg_vector_norm") else 1
    return _reduced(node, shapes, integers(node, position, "dim", len(shapes[0])), "!")


def local_mean(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``ap.local_mean(x, dims, correction)``: examples may be cut, since each has the mean over those of its rank."""
    dims = integers(node, 1, "dim", len(shapes[0]))
    left = [letter(i) + ("!" if i in dims and i else "") for i in range(len(shapes[0]))]
    return Derived(line([left], [["1" if i in dims and i else letter(i) for i in range(len(left))]]))


def along(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Operations along one dimension that they need whole, results of the same rank: ``softmax cumsum topk sort``."""
    rank = len(shapes[0])
    position = 2 if node.op.startswith(("aten.topk", "aten.diff")) else 1
    dim = dimension(node, position, rank, -1)

    def terms(shape: Shape) -> list[str]:
        return [fixed(size) if i == dim else letter(i) for i, size in enumerate(shape)]

    return Derived(line(map(terms, shapes), (terms(value.shape) for value in node.outputs)))


def weight_norm(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten._weight_norm(v, g, dim)``: the norms of the slices along one dimension, all others whole."""
    dim = dimension(node, 2, len(shapes[0]))
    terms = [letter(i) if i == dim else fixed(size) for i, size in enumerate(shapes[0])]
    lengths = [letter(i) if i == dim else fixed(size) for i, size in enumerate(shapes[1])]
    return Derived(line([terms, lengths], [terms]))


def _some_whole(node: Node, shapes: tuple[Shape, ...], dims: Sequence[int]) -> Derived:
    terms = [fixed(size) if i in dims else letter(i) for i, size in enumerate(shapes[0])]
    return Derived(line([terms], [terms]))


def flip(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.flip(x, dims)``."""
    return _some_whole(node, shapes, integers(node, 1, "dims", len(shapes[0])))


def roll(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.roll(x, shifts, dims)``."""
    return _some_whole(node, shapes, integers(node, 2, "dims", len(shapes[0])))


def factory(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """Constants of a given shape (``zeros full new_ones``): every dimension may be cut, operands only lend their dtype."""
    names = [letter(i) for i in range(len(node.outputs[0].shape))]
    return Derived(line((map(fixed, shape) for shape in shapes), [names]))


def whole_factory(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``arange``, ``scalar_tensor``: never cut."""
    return Derived(line((map(fixed, shape) for shape in shapes), (map(fixed, value.shape) for value in node.outputs)))


def slice_scatter(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.slice_scatter(x, part, dim, ...)``, ``aten.select_scatter(x, part, dim, index)``: the written dimension whole."""
    rank = len(shapes[0])
    dim = dimension(node, 2, rank)
    whole = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    written = [letter(i) for i in range(rank) if i != dim]
    if len(shapes[1]) == rank:
        written.insert(dim, fixed(shapes[1][dim]))
    return Derived(line([whole, written], [whole]))


def scatter(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.scatter(x, dim, index, source or number)``: batch over the dimensions that agree, the written one whole."""
    return _scatter(node, shapes, "")


def scatter_add(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.scatter_add(x, dim, index, source)``: a sum over what is written, Partial where that is sharded."""
    return _scatter(node, shapes, "z+")


def _scatter(node: Node, shapes: tuple[Shape, ...], along: str) -> Derived:
    rank = len(shapes[0])
    dim = dimension(node, 1, rank)
    agree = [i != dim and all(shape[i] == shapes[0][i] for shape in shapes) for i in range(rank)]
    along = along if all(shape[dim] == shapes[1][dim] for shape in shapes[1:]) else ""
    whole = [letter(i) if agree[i] else fixed(size) for i, size in enumerate(shapes[0])]
    written = [
        [letter(i) if agree[i] else along if i == dim and along else fixed(size) for i, size in enumerate(shape)]
        for shape in shapes[1:]
    ]
    return Derived(line([whole, *written], [whole]), addends=(0,) if along else None)


def index_add(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.index_add(x, dim, index, source)``: a sum over what is added, Partial where that is sharded."""
    rank = len(shapes[0])
    dim = dimension(node, 1, rank)
    whole = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    added = ["z+" if i == dim else letter(i) for i in range(rank)]
    return Derived(line([whole, ["z+"], added], [whole]), addends=(0,))


def histogram(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``aten.histc(x, bins, min, max)`` with bounds of its own: counts add up."""
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return None  # the bounds are those of the data
    return Derived(line([[f"{letter(i)}+" for i in range(len(shapes[0]))]], [[fixed(node.outputs[0].shape[0])]]))


def gather(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``aten.gather(x, dim, index)``: batch over the dimensions that agree, the gathered one whole."""
    rank = len(shapes[0])
    dim = dimension(node, 1, rank)
    agree = [i != dim and shapes[0][i] == shapes[1][i] for i in range(rank)]
    left = [letter(i) if agree[i] else fixed(size) for i, size in enumerate(shapes[0])]
    index = [letter(i) if agree[i] or i == dim else fixed(size) for i, size in enumerate(shapes[1])]
    return Derived(line([left, index], [index]))


def index_select(node: Node, shapes: tuple[Shape, ...]) -> Derived:
    """``aten.index_select(x, dim, index)``: like a lookup in a table."""
    rank = len(shapes[0])
    dim = dimension(node, 1, rank)
    left = [fixed(size) if i == dim else letter(i) for i, size in enumerate(shapes[0])]
    return Derived(line([left, [letter(dim)]], [[letter(i) for i in range(rank)]]))


def index(node: Node, shapes: tuple[Shape, ...]) -> Derived | None:
    """``aten.index.Tensor(x, indices)`` with adjacent integer indices: indexed dimensions whole, all others factors."""
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
    kept = iter([*names[: dims[0]], *names[dims[0] + broadcast :]])
    left = [fixed(size) if i in dims else next(kept) for i, size in enumerate(shapes[0])]
    operands = [left]
    for shape in shapes[1:]:
        offset = broadcast - len(shape)
        operands.append([middle[i + offset] if size == extent[i + offset] else fixed(size) for i, size in enumerate(shape)])
    return Derived(line(operands, [names]))
