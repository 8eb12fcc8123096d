"""Rows of views, and of operations that put parts together: the elements stay, their places change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from autopar.checker.rows.carry import Dim, Dims, OperationRow, plain
from autopar.checker.rows.elements import Rows, aten, letters, never, redundant, without
from autopar.checker.rows.operation_call import WholeCall
from autopar.checker.shards import Shape


def permuted(order: Callable[[WholeCall], Sequence[int]]) -> Callable[[WholeCall], OperationRow]:
    def row(call: WholeCall) -> OperationRow:
        dims = letters(call.shapes[0])
        return OperationRow((dims,), (tuple(dims[i] for i in order(call)),), linear=((0,),))

    return row


def _swapped(one: str | int, two: str | int) -> Callable[[WholeCall], list[int]]:
    def order(call: WholeCall) -> list[int]:
        rank = len(call.shapes[0])
        a, b = ((call.dim(each) if isinstance(each, str) else each) for each in (one, two))
        out = list(range(rank))
        if rank > 1:
            out[a], out[b] = out[b], out[a]
        return out

    return order


def reshape(call: WholeCall) -> OperationRow:
    """The flat index stays: both shapes as factors between all places where the products of their sizes meet or nest."""
    whole = prod(call.shapes[0])
    if whole == 0:
        return redundant(call)
    places = sorted({*_places(call.shapes[0]), *_places(call.results[0])})
    if any(b % a for a, b in zip(places, places[1:], strict=False)):
        places = sorted({*_places(call.shapes[0])} & {*_places(call.results[0])})
    return OperationRow((_between(call.shapes[0], places),), (_between(call.results[0], places),), linear=((0,),))


def _places(shape: Shape) -> Iterator[int]:
    below = 1
    yield below
    for size in reversed(shape):
        below *= size
        yield below


def _between(shape: Shape, places: Sequence[int]) -> Dims:
    """Each dimension as the factors that lie within it; one that has places of the other shape only in part is never cut."""
    out: list[Dim] = []
    below = prod(shape)
    for size in shape:
        above, below = below, below // size
        inside = [place for place in places if below <= place <= above]
        factors = [(f"f{a}", b // a) for a, b in zip(inside, inside[1:], strict=False)][::-1]
        complete = inside and inside[0] == below and inside[-1] == above
        out.append(tuple(factors) if factors and complete else (("", size),))
    return tuple(out)


def part_of_dim(call: WholeCall) -> OperationRow:
    """``slice split chunk narrow``: runs of all ranks end where parts do (`whole_runs` in `local_arguments`)."""
    dim = call.dim(default=0)
    results = tuple(plain([f"d{i}" for i in range(len(shape))], shape) for shape in call.results)
    if call.get("step", 1) != 1:
        return without(lambda _: (dim,), linear=True)(call)
    return OperationRow((letters(call.shapes[0]),), results, linear=((0,),))


def selected(call: WholeCall) -> OperationRow:
    """``select unbind``: the dimension goes."""
    dim = call.dim(default=0)
    dims = letters(call.shapes[0], without=(dim,))
    return OperationRow((dims,), (dims[:dim] + dims[dim + 1 :],) * len(call.results), linear=((0,),))


def concatenated(call: WholeCall) -> OperationRow:
    rank = len(call.results[0])
    operands = tuple(letters(shape) if len(shape) == rank else never(shape) for shape in call.shapes)
    return OperationRow(operands, (letters(call.results[0]),), linear=(tuple(range(len(operands))),))


def stacked(call: WholeCall) -> OperationRow:
    dim = call.dim(default=0, rank=len(call.results[0]))
    dims = letters(call.shapes[0])
    result = (*dims[:dim], (("", len(call.shapes)),), *dims[dim:])
    return OperationRow((dims,) * len(call.shapes), (result,), linear=(tuple(range(len(call.shapes))),))


def repeated(call: WholeCall) -> OperationRow:
    """``repeat``: copies are a major factor."""
    result = call.results[0]
    offset = len(result) - len(call.shapes[0])
    dims = letters(call.shapes[0], f"x{offset}_")
    made = [((("", size),) if i < offset else (("", size // max(1, call.shapes[0][i - offset])), *dims[i - offset]))
            for i, size in enumerate(result)]  # fmt: skip
    return OperationRow((dims,), (tuple(made),), linear=((0,),))


def interleaved(call: WholeCall) -> OperationRow:
    """``repeat_interleave`` by a number: copies are a minor factor."""
    times = call.get("repeats")
    if len(call.shapes) > 1 or not isinstance(times, int) or call.get("dim") is None:
        return redundant(call)
    dim, dims = call.dim(), letters(call.shapes[0])
    return OperationRow(
        (dims,), (tuple((*each, ("", times)) if i == dim else each for i, each in enumerate(dims)),), linear=((0,),)
    )


def halves(call: WholeCall) -> OperationRow:
    """``glu``: a dimension is two halves."""
    dim, dims = call.dim(), letters(call.results[0])
    return OperationRow((tuple((("", 2), *each) if i == dim else each for i, each in enumerate(dims)),), (dims,))


def pairs(call: WholeCall) -> OperationRow:
    """``view_as_complex view_as_real``."""
    names = letters(min(call.shapes[0], call.results[0], key=len))
    longer = (*names, (("", 2),))
    sides = (names, longer) if len(call.shapes[0]) < len(call.results[0]) else (longer, names)
    return OperationRow((sides[0],), (sides[1],), linear=((0,),))


def other_bits(call: WholeCall) -> OperationRow:
    """``view(dtype)``: elements of another size change the last dimension, which is whole then."""
    last = (len(call.shapes[0]) - 1,) if call.shapes[0] != call.results[0] else ()
    return OperationRow((letters(call.shapes[0], without=last),), (letters(call.results[0], without=last),))


def diagonal(call: WholeCall) -> OperationRow:
    given = (call.dim("dim1", 0), call.dim("dim2", 1))
    dims = letters(call.shapes[0], without=given)
    kept = [each for i, each in enumerate(dims) if i not in given]
    return OperationRow((dims,), ((*kept, (("", call.results[0][-1]),)),), linear=((0,),))


def windows(call: WholeCall) -> OperationRow:
    """``unfold``."""
    dim = call.dim("dimension")
    dims = letters(call.shapes[0], without=(dim,))
    made = [(("", call.results[0][i]),) if i == dim else each for i, each in enumerate(dims)]
    return OperationRow((dims,), ((*made, (("", call.results[0][-1]),)),), linear=((0,),))


ROWS: Rows = {
    "aten.permute": permuted(lambda call: call.dims("dims")),
    "aten.transpose": permuted(_swapped("dim0", "dim1")),
    "aten.t": permuted(_swapped(0, 1)),
    **aten("reshape squeeze unsqueeze", reshape),
    **aten("slice split split_with_sizes chunk", part_of_dim),
    **aten("select unbind", selected),
    "aten.cat": concatenated,
    "aten.stack": stacked,
    "aten.repeat": repeated,
    "aten.repeat_interleave": interleaved,
    "aten.glu": halves,
    **aten("view_as_complex view_as_real", pairs),
    "aten.view.dtype": other_bits,
    "aten.diagonal": diagonal,
    "aten.unfold": windows,
}
