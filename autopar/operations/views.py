"""Operations that only move elements: views, whose line follows from the shapes of operands and results, and copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.common_factors import common_factors
from autopar.operations.notation.line_text import (
    dim_argument,
    dims_argument,
    except_dims,
    fixed,
    leading_dims,
    letter,
    line_text,
    words,
)
from autopar.operations.notation.rule import DerivedLine, argument
from autopar.operations.notation.spelling import OperationCall, function, method, operand, sizes_method
from autopar.operations.operation import Operation, several
from autopar.operations.pointwise import FIRST, elementwise_rule

DETACH = "aten.detach"
RESHAPE, SLICE, SPLIT = "aten.reshape", "aten.slice.Tensor", "aten.split.Tensor"
COMPLEX_VIEW, REAL_VIEW = "aten.view_as_complex", "aten.view_as_real"
RESHAPES = (RESHAPE, "aten.view", "aten._unsafe_view")
SLICE_END = 2**62
"""The largest end of a slice: above it there is none."""


def reshape_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.reshape``: the common factors of both shapes, e.g. ``a b (c d) -> a b c d``."""
    names = (letter(index) for index in count())
    left, right, sizes = common_factors(shapes[0], node.outputs[0].shape)
    name = {index: next(names) for index in range(len(sizes))}

    def terms(groups: Sequence[Sequence[int]], shape: Shape) -> list[str]:
        return [
            fixed(size) if not group else name[group[0]] if len(group) == 1 else "(" + " ".join(name[i] for i in group) + ")"
            for group, size in zip(groups, shape, strict=True)
        ]

    known = tuple((name[index], size) for index, size in enumerate(sizes))
    return DerivedLine(line_text([terms(left, shapes[0])], [terms(right, node.outputs[0].shape)]), known)


def permute_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.permute(x, dims)``, ``aten.transpose.int(x, a, b)``, ``aten.t``."""
    rank = len(shapes[0])
    order = list(range(rank))
    if node.op.startswith("aten.permute"):
        order = list(dims_argument(node, 1, "dims", rank))
    elif rank > 1:
        one, two = (
            (0, 1) if node.op == "aten.t" else (dim_argument(node, 1, rank, 0, "dim0"), dim_argument(node, 2, rank, 0, "dim1"))
        )
        order[one], order[two] = order[two], order[one]
    return DerivedLine(line_text([map(letter, range(rank))], [map(letter, order)]))


def squeeze_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``unsqueeze``, ``squeeze``: dimensions of size 1 are added or removed."""
    left = [letter(i) if size != 1 else "1" for i, size in enumerate(shapes[0])]
    remaining = iter([term for term in left if term != "1"])
    return DerivedLine(line_text([left], [["1" if size == 1 else next(remaining) for size in node.outputs[0].shape]]))


def split_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``slice split chunk``: equal, aligned parts of a dimension are its minor factor: ``a (3 b) -> a b, a b, a b``."""
    position = 2 if node.op.startswith(("aten.split", "aten.chunk")) else 1
    dim = dim_argument(node, position, len(shapes[0]))
    whole, sizes = shapes[0][dim], [value.shape[dim] for value in node.outputs]
    size = sizes[0]
    aligned = isinstance(whole, int) and isinstance(size, int) and size > 0 and whole % size == 0 and set(sizes) == {size}
    if aligned and node.op.startswith("aten.slice"):
        start = argument(node, 2, "start") or 0
        step = argument(node, 4, "step", 1)
        aligned = isinstance(start, int) and start % size == 0 and step == 1  # type: ignore[operator]
    same = sizes == [whole]
    term = letter(dim) if same else f"({whole // size} {letter(dim)})" if aligned else fixed(whole)  # type: ignore[operator]
    left = [term if i == dim else letter(i) for i in range(len(shapes[0]))]
    results = [
        [letter(i) if i != dim or aligned or same else fixed(value.shape[i]) for i in range(len(left))] for value in node.outputs
    ]
    return DerivedLine(line_text([left], results))


def select_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.select.int(x, dim, index)`` and ``aten.unbind(x, dim)``: all but the selected dimension, which is removed."""
    dim = dim_argument(node, 1, len(shapes[0]))
    kept = [letter(i) for i in range(len(shapes[0])) if i != dim]
    return DerivedLine(line_text([words(shapes[0], {dim})], [kept] * len(node.outputs)))


def concatenate_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.cat``: operands of equal size are the minor factor of the result: ``a b, a b -> a (2 b)``."""
    rank = len(node.outputs[0].shape)
    dim = dim_argument(node, 1, rank)
    sizes = {shape[dim] for shape in shapes if len(shape) == rank}
    equal = len(sizes) == 1 and all(len(shape) == rank for shape in shapes) and isinstance(shapes[0][dim], int)
    operands = [
        [letter(i) if i != dim or equal else fixed(size) for i, size in enumerate(shape)]
        if len(shape) == rank
        else [fixed(shape[0])]
        for shape in shapes
    ]
    whole = f"({len(shapes)} {letter(dim)})" if equal else fixed(node.outputs[0].shape[dim])
    return DerivedLine(line_text(operands, [[letter(i) if i != dim else whole for i in range(rank)]]))


def repeat_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.repeat(x, repeats)``: copies are a major factor of the result: ``a -> (3 a)``."""
    repeats = node.args[1]
    if 0 in node.outputs[0].shape:
        return None
    assert isinstance(repeats, tuple)
    offset = len(repeats) - len(shapes[0])
    terms = [letter(i + offset) if size != 1 else "1" for i, size in enumerate(shapes[0])]
    result = [fixed(size) for size in node.outputs[0].shape]
    for i, term in enumerate(terms):
        times = repeats[i + offset]
        if term != "1" and isinstance(times, int):
            result[i + offset] = term if times == 1 else f"({times} {term})"
        elif term != "1":
            terms[i] = fixed(shapes[0][i])
    return DerivedLine(line_text([terms], [result]))


def repeat_interleave_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """``aten.repeat_interleave.self_int(x, repeats, dim)``: copies are a minor factor of the result: ``a -> (a 3)``."""
    times = argument(node, 1, "repeats")
    if len(shapes) > 1 or not isinstance(times, int) or argument(node, 2, "dim") is None:
        return None
    rank = len(shapes[0])
    dim = dim_argument(node, 2, rank)
    return DerivedLine(
        line_text([map(letter, range(rank))], [[f"({letter(i)} {times})" if i == dim else letter(i) for i in range(rank)]])
    )


def stack_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.stack``: all but the new dimension."""
    result = words(shapes[0])
    result.insert(dim_argument(node, 1, len(result) + 1), str(len(shapes)))
    return DerivedLine(line_text(map(words, shapes), [result]))


def pair_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``view_as_complex view_as_real``: the pair is never sharded."""
    names = [letter(i) for i in range(min(len(shapes[0]), len(node.outputs[0].shape)))]
    sides = [names, [*names, fixed(2)]]
    left, right = sides if len(shapes[0]) == len(names) else sides[::-1]
    return DerivedLine(line_text([left], [right]))


def diagonal_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.diagonal(x, offset, dim1, dim2)``: the other dimensions."""
    rank = len(shapes[0])
    given = [int(argument(node, at, name, default)) % rank for at, name, default in ((2, "dim1", 0), (3, "dim2", 1))]  # type: ignore[arg-type]
    kept = [letter(i) for i in range(rank) if i not in given]
    return DerivedLine(line_text([words(shapes[0], given)], [[*kept, fixed(node.outputs[0].shape[-1])]]))


def windows_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.unfold(x, dim, size, step)``: all but the unfolded dimension; the window is a further one."""
    dim, result = dim_argument(node, 1, len(shapes[0])), node.outputs[0].shape
    return DerivedLine(line_text([words(shapes[0], {dim})], [[*words(result[:-1], {dim}), fixed(result[-1])]]))


def whole_dims_rule(position: int, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``aten.flip(x, dims)``, ``aten.roll(x, shifts, dims)``: all but the dimensions that argument `position` names."""
    return except_dims(dims_argument(node, position, "dims", len(shapes[0])), node, shapes)


def pad_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine:
    """``constant_pad_nd pad``: all but the padded dimensions."""
    amounts = node.args[1]
    assert isinstance(amounts, tuple)
    rank = len(shapes[0])
    padded = {rank - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    return except_dims(padded, node, shapes)


def _subscript(dim: int, index: str) -> str:
    return f"[{', '.join([':'] * dim + [index])}]" if dim >= 0 else f"[..., {', '.join([index] + [':'] * (-dim - 1))}]"


def _slice_expression(call: OperationCall) -> str | None:
    args = call.node.args
    dim = args[1] if len(args) > 1 else 0
    if call.kwargs or not isinstance(dim, int):
        return None
    start = call.args[2] if call.has(2) and args[2] != 0 else ""
    end = args[3] if len(args) > 3 else None
    stop = "" if end is None or (isinstance(end, int) and not isinstance(end, bool) and end > SLICE_END) else call.args[3]
    step = f":{call.args[4]}" if call.has(4) and args[4] != 1 else ""
    return f"{operand(call.args[0])}{_subscript(dim, f'{start}:{stop}{step}')}"


def _select_expression(call: OperationCall) -> str | None:
    dim = call.node.args[1]
    return None if call.kwargs or not isinstance(dim, int) else f"{operand(call.args[0])}{_subscript(dim, call.args[2])}"


OPERATIONS = (
    Operation(RESHAPE, reshape_rule, FIRST, view=True, sizes_at=1, spelling=sizes_method),
    Operation("aten.permute", permute_rule, FIRST, view=True, spelling=sizes_method),
    *several(Operation("aten", permute_rule, FIRST, view=True, spelling=method), "transpose t"),
    *several(Operation("aten", squeeze_rule, FIRST, view=True, spelling=method), "unsqueeze squeeze"),
    Operation("aten.expand", elementwise_rule, FIRST, view=True, slices=True, sizes_at=1, spelling=sizes_method),
    Operation("aten.slice", split_rule, FIRST, view=True, slices=True, spelling=_slice_expression),
    Operation("aten.select", select_rule, FIRST, view=True, slices=True, spelling=_select_expression),
    *several(
        Operation("aten", split_rule, FIRST, view=True, slices=True, gives_tuple=True, spelling=method),
        "split split_with_sizes chunk",
    ),
    Operation("aten.unbind", select_rule, FIRST, view=True, slices=True, gives_tuple=True, spelling=method),
    Operation("aten.narrow", view=True, slices=True, spelling=method),
    Operation(DETACH, elementwise_rule, ((0,),), view=True, spelling=method),
    Operation("aten.alias", elementwise_rule, FIRST, view=True),
    *several(Operation("aten", view=True, spelling=method), "expand_as flatten unflatten"),
    *several(Operation("aten", view=True), "view _unsafe_view numpy_T view_as swapaxes movedim tensor_split"),
    *several(Operation("aten", pair_rule), "view_as_complex view_as_real"),
    Operation("aten.diagonal", diagonal_rule),
    Operation("aten.unfold", windows_rule),
    Operation("aten.cat", concatenate_rule, ("all",), spelling=function("torch")),
    Operation("aten.stack", stack_rule, ("all",), spelling=function("torch")),
    Operation("aten.repeat", repeat_rule, spelling=sizes_method),
    Operation("aten.repeat_interleave", repeat_interleave_rule, spelling=method),
    Operation("aten.flip", partial(whole_dims_rule, 1), spelling=method),
    Operation("aten.roll", partial(whole_dims_rule, 2), spelling=method),
    Operation("aten.pad", pad_rule, spelling=function("F")),
    Operation("aten.constant_pad_nd", pad_rule),
    *several(
        Operation("aten", pad_rule),
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    ),
    *several(Operation("aten", partial(leading_dims, -2), spelling=method), "tril triu"),
)
