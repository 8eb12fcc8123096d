"""Reads and writes by index: lookups, gathers, scatters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node, Ref
from autopar.operations.notation.line_text import dim_argument, fixed, letter, line_text, words
from autopar.operations.notation.rule import DerivedLine, NamedFunction
from autopar.operations.notation.spelling import OperationCall, function, method, operand
from autopar.operations.operation import Operation, several


def slice_scatter_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.slice_scatter(x, part, dim, ...)``, ``aten.select_scatter(x, part, dim, index)``: all but the written dimension."""
    rank = len(shapes[0])
    dim = dim_argument(node, 2, rank)
    whole = words(shapes[0], {dim})
    written = [letter(i) for i in range(rank) if i != dim]
    if len(shapes[1]) == rank:
        written.insert(dim, fixed(shapes[1][dim]))
    return DerivedLine(line_text([whole, written], [whole]))


def scatter_rule(along: str, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.scatter(x, dim, index, source or number)``: the dimensions of equal size, but the written one. `along` is the word
    of that dimension of the source, which ``scatter_add`` sums."""
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
    whole = words(shapes[0], {dim})
    added = ["z+" if i == dim else letter(i) for i in range(rank)]
    return DerivedLine(line_text([whole, ["z+"], added], [whole]), addends=(0,))


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
    dim = dim_argument(node, 1, len(shapes[0]))
    return DerivedLine(line_text([words(shapes[0], {dim}), [letter(dim)]], [words(shapes[0])]))


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
    names = words(result)
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


def index_put_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.index_put(x, indices, values)`` whose indexed dimensions come first: the others, where the values have them. None
    where an index has the shape of several dimensions of x, as a mask of them has."""
    given = node.args[1]
    assert isinstance(given, tuple)
    dims = [i for i, item in enumerate(given) if isinstance(item, Ref)]
    if dims != list(range(len(dims))) or any(_covers(index, shapes[0]) for index in shapes[1:-1]):
        return None
    rank, values = len(shapes[0]), shapes[-1]
    tail = rank - len(dims)
    names = words(shapes[0], range(len(dims)))
    own = [fixed(size) for size in values]
    for back in range(1, tail + 1):
        if len(values) >= back and values[-back] == shapes[0][-back]:
            own[-back] = letter(rank - back)
    indices = [list(map(fixed, shape)) for shape in shapes[1:-1]]
    return DerivedLine(line_text([names, *indices, own], [names]))


def _covers(index: Shape, x: Shape) -> bool:
    """Return whether an index may be a mask of several dimensions of x, where the batch of one may be a number."""
    runs = (x[at : at + len(index)] for at in range(len(x) - len(index) + 1)) if len(index) > 1 else ()
    return any(
        all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(index, run, strict=True)) for run in runs
    )


def _sharded_embedding(node: Node, axis: str) -> Node:
    weight, ids, *rest = node.args
    padding = rest[0] if rest else dict(node.kwargs).get("padding_idx", -1)
    found = padding if isinstance(padding, int) and padding >= 0 else None
    kwargs: tuple[tuple[str, Arg], ...] = (("axis", axis), ("padding_idx", found))
    return replace(node, args=(ids, weight), kwargs=kwargs)


def _embedding_expression(call: OperationCall) -> str | None:
    padding = call.args[2] if len(call.args) > 2 else "-1"
    if set(call.kwargs) - {"padding_idx"}:
        return None
    padding = call.kwargs.get("padding_idx", padding)
    tail = f", padding_idx={padding}" if padding not in ("-1", "None") else ""
    return f"F.embedding({call.args[1]}, {call.args[0]}{tail})"


def _index_expression(call: OperationCall) -> str | None:
    indices = call.node.args[1]
    if not isinstance(indices, tuple) or call.kwargs:
        return None
    inside = call.args[1][1:-1].rstrip(",")
    words = [":" if index is None else word for index, word in zip(indices, inside.split(", "), strict=True)]
    return f"{operand(call.args[0])}[{', '.join(words)}]"


OPERATIONS = (
    Operation(
        "aten.embedding", "v+ d, ... -> ... d", lookup=True, embedding=True, layer=True, named_after_module=True,
        # each rank looks up its own rows, and has zeros for all others (Partial)
        functions=(NamedFunction("v", "ap.embedding_sharded", at=(0, 0), rewrite=_sharded_embedding, uneven=True),),
        spelling=_embedding_expression,
    ),
    Operation("ap.embedding_sharded", embedding=True, layer=True, spelling=function("C")),
    Operation("aten.one_hot", "... -> ... c!", spelling=function("F")),
    Operation("aten.gather", gather_rule, lookup=True, spelling=method),
    Operation("aten.index_select", index_select_rule, lookup=True, spelling=method),
    Operation("aten.index", index_rule, lookup=True, spelling=_index_expression),
    *several(Operation("aten", slice_scatter_rule), "slice_scatter select_scatter"),
    Operation("aten.scatter", partial(scatter_rule, ""), spelling=method),
    Operation("aten.scatter_reduce", partial(scatter_rule, "")),
    Operation("aten.scatter_add", partial(scatter_rule, "z+"), spelling=method),
    Operation("aten.index_add", index_add_rule, spelling=method),
    *several(Operation("aten", index_put_rule), "index_put _unsafe_index_put"),
)  # fmt: skip
