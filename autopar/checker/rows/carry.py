"""How one operation carries types: from the kinds of its operands on an axis to those of its results.

A row describes an operation: each dimension of each operand and result as factors with names, major first. Ranks may hold parts
of a factor where every operand that has it is cut there alike; a result that has it is cut so too, and one in which it was summed
is partial. This is all that the proof of a block rests on, and every row is proven by execution (`tests/checker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.checker.shards import PARTIAL, REPLICATED, Axes, Cut, Kind, Kinds, Shape, equal_kind

Factor = tuple[str, int]
"""Name and size. The name of one that is never cut is empty."""
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class OperationRow:
    """One operation on tensors of given global shapes.

    Attributes:
        reduced: the factors that are summed (``sum``), or of which the maximum or minimum is taken.
        linear: sets of operands in which it is linear, all others being constants: partial values pass through.
        addends: operands that a sum counts once (a bias), which must be partial where a summed factor is cut.
        new: factors that no operand has, whose elements are all alike or made of numbers: any axis may cut them.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reduced: dict[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    addends: tuple[int, ...] = ()
    new: frozenset[str] = frozenset()


class NotCarried(ValueError):
    """What is wrong with the kinds of the operands."""


def carry(
    row: OperationRow, axes: Axes, operands: Sequence[Kinds], flows: Sequence[bool], wanted: Sequence[Kinds | None],
    known: Mapping[str, list[Kind]] = MappingProxyType({}),
) -> list[Kinds]:  # fmt: skip
    """The kinds of the results. `flows`: whether a gradient comes back for an operand. `wanted` are what the plan says of results
    that ranks make of numbers, for which any cut is right. `known`: those on axes on which a lemma or a rule tells them, and not
    the row. NotCarried where the operation cannot run on these shards."""
    per_axis = [
        known.get(name)
        or _on_axis(row, size, [kinds[axis] for kinds in operands], flows, [w[axis] if w else None for w in wanted], name)
        for axis, (name, size) in enumerate(zip(axes.names, axes.sizes, strict=True))
    ]
    return [tuple(kinds[result] for kinds in per_axis) for result in range(len(row.results))]


def _on_axis(
    row: OperationRow, size: int, kinds: list[Kind], flows: Sequence[bool], wanted: Sequence[Kind | None], name: str
) -> list[Kind]:
    cuts = {
        index: _digit(row.operands[index], kind, size, f"operand {index + 1} on {name}")
        for index, kind in enumerate(kinds)
        if isinstance(kind, Cut)
    }
    digits = set(cuts.values())
    if len(digits) > 1:
        raise NotCarried(f"on {name} its operands are cut differently: {' and '.join(sorted(map(str, digits)))}")
    if not digits:
        return _without_cut(row, kinds, flows, wanted, name, size)
    ((factor, inner),) = digits
    for index, (dims, kind) in enumerate(zip(row.operands, kinds, strict=True)):
        if index in cuts:
            continue
        if any(factor == each for dim in dims for each, _ in dim):
            raise NotCarried(f"on {name} operand {index + 1} is {kind}, but another operand is cut along the same dimension")
        if factor in row.reduced and index in row.addends:
            if kind != PARTIAL:
                raise NotCarried(f"on {name} operand {index + 1} is {kind}: it would be added once by each rank")
        else:
            _require_constant(index, kind, flows[index], name)
    out: list[Kind] = []
    for dims in row.results:
        place = _place(dims, factor, inner, size)
        if place is not None:
            out.append(place)
        elif factor in row.reduced:
            out.append(PARTIAL if row.reduced[factor] == "sum" else f"P{row.reduced[factor]}")
        else:
            raise NotCarried(f"on {name} a result does not have the dimension that is cut")
    return out


def _without_cut(
    row: OperationRow, kinds: list[Kind], flows: Sequence[bool], wanted: Sequence[Kind | None], name: str, size: int
) -> list[Kind]:
    partial = [index for index, kind in enumerate(kinds) if not equal_kind(kind)]
    if partial:
        if any(kinds[index] != PARTIAL for index in partial):
            raise NotCarried(f"on {name} operand {partial[0] + 1} is {kinds[partial[0]]}, which is read before it is reduced")
        if tuple(partial) not in row.linear:
            raise NotCarried(f"on {name} operand {partial[0] + 1} is partial, and the operation is not linear in it")
        for index, kind in enumerate(kinds):
            if index not in partial:
                _require_constant(index, kind, flows[index], name)
        return [PARTIAL] * len(row.results)
    made = [_made(dims, want, row, size) for dims, want in zip(row.results, wanted, strict=True)]
    if any(isinstance(kind, Cut) for kind in made):
        for index, kind in enumerate(kinds):
            _require_constant(index, kind, flows[index], name)
        return [kind if kind is not None else REPLICATED for kind in made]
    flowing = {kind for kind, flow in zip(kinds, flows, strict=True) if flow}
    if len(flowing) > 1:
        raise NotCarried(f"on {name} one operand is invariant and another one replicated: one of the gradients would be wrong")
    return [next(iter(flowing), REPLICATED)] * len(row.results)


def _require_constant(index: int, kind: Kind, flow: bool, name: str) -> None:
    """An operand that is equal on all ranks, beside others that are not: each rank has a summand of its gradient."""
    if not equal_kind(kind):
        raise NotCarried(f"on {name} operand {index + 1} is {kind} beside an operand that is cut or partial")
    if flow and kind != REPLICATED:
        raise NotCarried(f"on {name} operand {index + 1} is invariant, but each rank makes only a part of its gradient")


def _digit(dims: Dims, cut: Cut, size: int, where: str) -> tuple[str, int]:
    """The factor that is cut, and the elements of it in a run."""
    below = 1
    for factor, extent in reversed(dims[cut.dim] if cut.dim < len(dims) else ()):
        if cut.inner < below * extent:
            inner = cut.inner // below
            if cut.inner % below or extent % (inner * size) or not factor:
                break
            return factor, inner
        below *= extent
    raise NotCarried(f"{where} is cut along dimension {cut.dim}, which the operation reads as a whole")


def _place(dims: Dims, factor: str, inner: int, size: int) -> Cut | None:
    for index, dim in enumerate(dims):
        below = 1
        for each, extent in reversed(dim):
            if each == factor:
                if extent % (inner * size):
                    raise NotCarried(f"a run of {inner} elements on each of {size} ranks does not fit in {extent}")
                return Cut(index, inner * below)
            below *= extent
    return None


def _made(dims: Dims, want: Kind | None, row: OperationRow, size: int) -> Kind | None:
    """The kind of a result where it is cut along a new factor, as the plan wants it."""
    if not isinstance(want, Cut):
        return None
    try:
        factor, _ = _digit(dims, want, size, "the result")
    except NotCarried:
        return None
    return want if factor in row.new else None


def plain(names: Sequence[str], shape: Shape) -> Dims:
    """Dimensions of one factor each; an empty name is never cut."""
    return tuple(((name, extent),) for name, extent in zip(names, shape, strict=True))
