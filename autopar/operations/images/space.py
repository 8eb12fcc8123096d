"""Images ``[n, c, ...]`` that are cut along one dimension of space: words and named functions of all operations on images.

Of an image the longest dimension of space may be cut (the first of equal ones), so that all operations of a network agree. The
result must be `stride` times shorter (or longer), so that shards of both match: ``(row 2) -> row``. Where results read rows of
their own shard only (kernel and stride are equal), the factor is ``row`` and the local operation is the same. Else it is
``halo``, and a named function gets `before` and `after` rows from the neighbours: a halo, which is no larger than their shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node
from autopar.operations.notation.line_text import fixed, line_text
from autopar.operations.notation.rule import DerivedLine, NamedFunction, OperationCollective

SMALLEST = 4096
"""Pixels of an image below which it is not cut: its activations are small, and a rank's part would be mostly halo."""

OWN, HALO = "row", "halo"
"""The factor of the cut dimension: without and with rows from the neighbours. No other line has a factor of these names."""

SPACE = (0, None)
"""A named function shards a dimension of space of the first operand (`NamedFunction.at`)."""

Halo = tuple[int, int]
"""Rows before and after its shard that a rank reads."""

HaloOf = Callable[[Node, tuple[Shape, ...], int], Halo | None]
"""The halo of a node along a dimension; None where shards of operand and result do not match."""


def cut_dim(shape: Shape) -> int | None:
    """The dimension of an image ``[n, c, ...]`` that may be cut; None where it is small."""
    space = [size for size in shape[2:] if isinstance(size, int)]
    if not space or len(space) < len(shape) - 2 or prod(space) < SMALLEST:
        return None
    return 2 + space.index(max(space))


def numbers(arg: Arg, count: int, default: int) -> list[int] | None:
    """An argument as one number for each dimension of space; None where it is none."""
    listed = (default,) if arg is None or arg == () else arg if isinstance(arg, tuple) else (arg,)
    out = [item for item in listed if isinstance(item, int) and not isinstance(item, bool)]
    if len(listed) not in (1, count) or len(out) < len(listed):
        return None
    return out * (count if len(out) == 1 else 1)


def window_halo(node: Node, shapes: tuple[Shape, ...], dim: int, window: tuple[int, int, int]) -> Halo | None:
    """Return the halo of windows of ``reach + 1`` rows, `stride` apart, the first beginning `padding` rows before the image."""
    reach, stride, padding = window
    result = node.outputs[0].shape[dim]
    if not isinstance(result, int) or result * stride != shapes[0][dim]:
        return None
    return padding, max(0, reach + 1 - stride - padding)


def halo_of(node: Node, shapes: tuple[Shape, ...], halo: HaloOf) -> tuple[int, Halo] | None:
    """The dimension that may be cut, and its halo; None where none may."""
    spatial, result = int(node.op.split(".")[1][-2]), node.outputs[0].shape
    if len(shapes[0]) != spatial + 2 or len(node.outputs) > 1:
        return None
    larger = max(shapes[0], result, key=lambda shape: prod(size for size in shape[2:] if isinstance(size, int)))
    dim = cut_dim(larger)
    found = None if dim is None else halo(node, shapes, dim)
    return None if dim is None or found is None else (dim, found)


def space_words(node: Node, shapes: tuple[Shape, ...], halo: HaloOf | None) -> tuple[list[str], list[str]]:
    """The words of the dimensions of space of the first operand and of the result."""
    words = [fixed(size) for size in shapes[0][2:]], [fixed(size) for size in node.outputs[0].shape[2:]]
    found = None if halo is None else halo_of(node, shapes, halo)
    if found is not None:
        dim, reads = found
        factor = HALO if any(reads) else OWN
        rows, result = shapes[0][dim], node.outputs[0].shape[dim]
        assert isinstance(rows, int) and isinstance(result, int)
        for side, mine, other in ((words[0], rows, result), (words[1], result, rows)):
            side[dim - 2] = f"({factor} {mine // other})" if mine > other else factor
    return words


def norm_words(shape: Shape) -> list[str]:
    """The words of the dimensions of space of a norm over them."""
    dim = cut_dim(shape)
    return [HALO if at == dim else fixed(size) for at, size in enumerate(shape) if at > 1]


def mean_words(shape: Shape) -> list[str] | None:
    """The words of the dimensions of space of a mean over all of them; None where it cannot be cut."""
    dim = cut_dim(shape) if len(shape) > 3 else None
    return None if dim is None else [f"{HALO}+" if at == dim else fixed(size) for at, size in enumerate(shape) if at > 1]


def statistics_collectives(node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """All-reduces of sums and of squares, and of two sums in the backward, of each group of channels."""
    groups = node.args[1] if node.op.startswith("aten.group_norm") else shapes[0][1]
    assert isinstance(groups, int)
    each = (shapes[0][0], groups)
    once = OperationCollective("all_reduce", each, "float32", operand=0)
    return once, once, OperationCollective("all_reduce", (2, *each), "float32", True, operand=0)


def mean_line(node: Node, words: list[str]) -> DerivedLine:
    """The line of a mean over all dimensions of space."""
    return DerivedLine(line_text([["n", "c", *words]], [["n", "c", *("1" for _ in node.outputs[0].shape[2:])]]))


def most_ranks(halo: HaloOf, node: Node, shapes: tuple[Shape, ...]) -> int:
    """Ranks whose shards are as large as the halo."""
    found = halo_of(node, shapes, halo)
    if found is None:
        return 1
    rows = shapes[0][found[0]]
    assert isinstance(rows, int)
    return rows // max(found[1])


def halo_collectives(halo: HaloOf, node: Node, shapes: tuple[Shape, ...]) -> tuple[OperationCollective, ...]:
    """A message to each neighbour in the forward, and of gradients back in the backward."""
    found = halo_of(node, shapes, halo)
    if found is None:
        return ()
    dim, reads = found
    return tuple(
        OperationCollective(
            "point_to_point", (*shapes[0][:dim], rows, *shapes[0][dim + 1 :]), node.outputs[0].dtype, backward, operand=0
        )
        for backward in (False, True)
        for rows in reads
        if rows
    )


def exchanging(name: str, halo: HaloOf) -> tuple[NamedFunction, ...]:
    """The named function of a cut image that gets the halo from the neighbours."""
    collectives, most = partial(halo_collectives, halo), partial(most_ranks, halo)
    return (NamedFunction(HALO, name, None, collectives, exclusive=True, most_ranks=most, at=SPACE, pads=True),)


def summing(name: str) -> tuple[NamedFunction, ...]:
    """The named function of a cut image that sums statistics over ranks."""
    return (NamedFunction(HALO, name, None, statistics_collectives, exclusive=True, at=SPACE),)
