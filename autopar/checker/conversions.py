"""Conversions of placements: what ``C.convert(x, tp, "S(1) -> R")`` makes of the kind of a tensor on its axis.

The table says for each pair what the collective does to values, and its dual to gradients. That a pair is in it is the lemma
that both are right: from summands to their sum, from equal gradients to equal gradients (proven on ranks in `tests/checker`).
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.checker.shards import INVARIANT, MICRO, PARTIAL, REPLICATED, Axes, Cut, Kind, Kinds, Shape
from autopar.ir.placement import Partial, Placement, Shard, parse_placement

COMMUNICATION = {
    "SR": ("gather", "reduce_scatter"), "SI": ("gather", ""), "SS": ("all_to_all", "all_to_all"), "SP": ("", ""),
    "PR": ("all_reduce", "all_reduce"), "PI": ("all_reduce", ""), "PS": ("reduce_scatter", "gather"), "IR": ("", "all_reduce"),
    "IS": ("", "gather"), "IP": ("", ""), "RS": ("", ""), "RI": ("", ""), "RP": ("", ""),
}  # fmt: skip
"""The collectives of each pair of placements, forward and backward: gathers, slices, sums, or zeros around a shard."""


class NoConversion(ValueError):
    """What is wrong with a conversion."""


def letter(place: Placement) -> str:
    return str(place)[0]


def read_conversion(text: str) -> tuple[Placement, Placement]:
    source, arrow, target = text.partition(" -> ")
    try:
        one, two = parse_placement(source), parse_placement(target)
    except ValueError as error:
        raise NoConversion(str(error)) from None
    if not arrow or letter(one) + letter(two) not in COMMUNICATION:
        raise NoConversion(f"there is no conversion {text!r}")
    return one, two


def letters(text: str) -> tuple[str, str]:
    """``("S", "R")`` of a conversion from a shard to replicated."""
    source, target = read_conversion(text)
    return letter(source), letter(target)


def convert(axes: Axes, shape: Shape, kinds: Kinds, axis: str, text: str, flows: bool) -> Kinds:
    """The kinds after a conversion. `flows`: whether a gradient comes back. NoConversion where the tensor is not of the kind that
    the conversion takes."""
    source, target = read_conversion(text)
    if axis not in axes.names:
        return kinds  # an axis of one rank
    index = axes.names.index(axis)
    size, kind = axes.sizes[index], kinds[index]
    after: Kind
    if isinstance(source, Shard):
        if (
            not isinstance(kind, Cut)
            or _normal(source.dim, shape) != kind.dim
            or source.parts != parts_of(axes, shape, kinds, index)
        ):
            raise NoConversion(f"it takes {source} on {axis}, but the tensor is {kind}")
    elif isinstance(source, Partial):
        if kind != ("P" if source.op == "sum" else f"P{source.op}"):
            raise NoConversion(f"it takes {source} on {axis}, but the tensor is {kind}")
        if source.op != "sum" and (letter(target) != "R" or flows):
            raise NoConversion(f"a {source.op} over ranks becomes R, and no gradient goes back")
    elif kind != letter(source) and not (not flows and kind in (REPLICATED, INVARIANT)):
        raise NoConversion(f"it takes {source} on {axis}, but the tensor is {kind}")
    others = (*kinds[:index], REPLICATED, *kinds[index + 1 :])
    if isinstance(target, Shard):
        after = cut_of(axes, shape, others, size, _normal(target.dim, shape), target.parts)
    elif isinstance(target, Partial):
        if target.op != "sum":
            raise NoConversion(f"nothing becomes {target}")
        after = PARTIAL
    else:
        after = letter(target)
    return (*kinds[:index], after, *kinds[index + 1 :])


def share(axes: Axes, kinds: Kinds, count: Any, dtype: torch.dtype) -> Kinds:
    """The kinds of a tensor that is divided by the number of micro-batches: it was alike in all, and is their sum now."""
    index = axes.names.index(MICRO) if MICRO in axes.names else -1
    if index < 0 or count != axes.sizes[index] or not dtype.is_floating_point:
        raise NoConversion(f"no floating-point tensor is the sum over {count} micro-batches")
    if kinds[index] != REPLICATED:
        raise NoConversion(f"it takes R on {MICRO}, but the tensor is {kinds[index]}")
    return (*kinds[:index], PARTIAL, *kinds[index + 1 :])


def _normal(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        raise NoConversion(f"a tensor of {len(shape)} dimensions has no dimension {dim}")
    return dim % len(shape)


def parts_of(axes: Axes, shape: Shape, kinds: Kinds, index: int) -> int:
    """Into how many parts the local dimension is divided that a gather on this axis puts together."""
    cut = kinds[index]
    assert isinstance(cut, Cut)
    local = shape[cut.dim] // axes.ranks(kinds, cut.dim)
    run = cut.inner
    for inner, size in axes.digits((*kinds[:index], REPLICATED, *kinds[index + 1 :]), cut.dim):
        if inner < cut.inner:
            run //= size
    return local // run if run else 0


def cut_of(axes: Axes, shape: Shape, kinds: Kinds, size: int, dim: int, parts: int) -> Cut:
    """The cut that a slice of the local tensor makes, in terms of the whole dimension: what other axes cut more finely lies
    within its runs."""
    local = shape[dim] // axes.ranks(kinds, dim)
    if local % (parts * size):
        raise NoConversion(f"{local} elements in {parts} parts do not divide over {size} ranks")
    run = local // (parts * size)
    for inner, ranks in sorted(axes.digits(kinds, dim)):
        if inner <= run:
            run *= ranks
    return Cut(dim, run)
