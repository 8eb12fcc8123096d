"""The placement graph of a value, without prices: states on the way from any production to any need, and the steps between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Value
from autopar.ir.placement import Partial, Placement, Placements, Shard
from autopar.rules.conversions import conversion, states


@dataclass(frozen=True, slots=True)
class Routes:
    """Steps as (source state, target state, price): steps of one price change the same axis in the same way, and the other axes
    cut the tensor into equally many parts. `prices` say so: (axis, from, to, parts); `examples` number a step of each."""

    states: tuple[Placements, ...]
    steps: tuple[tuple[int, int, int], ...]
    prices: tuple[tuple[int, Placement, Placement, int], ...]
    examples: tuple[int, ...]


def routes_between(
    value: Value, sizes: Sequence[int], produced: Collection[Placements], needed: Collection[Placements]
) -> Routes:
    """Nothing is brought to a Partial or a Shard that nobody needs."""
    among = states(value.shape, (*produced, *needed), sizes, value.differentiable)
    per_axis = [list(dict.fromkeys(state[axis] for state in among)) for axis in range(len(sizes))]
    moves = [_axis_moves(places, {at[axis] for at in needed}, value.differentiable) for axis, places in enumerate(per_axis)]
    index = [{place: number for number, place in enumerate(places)} for places in per_axis]
    coded = [tuple(index[axis][place] for axis, place in enumerate(state)) for state in among]
    number = {code: position for position, code in enumerate(coded)}
    cuts = [[size if type(place) is Shard else 1 for place in places] for places, size in zip(per_axis, sizes, strict=True)]
    found: list[tuple[int, int, tuple[int, int, int, int]]] = []
    for source, code in enumerate(coded):
        for axis in range(len(sizes)):
            others = 1
            for other, place in enumerate(code):
                if other != axis:
                    others *= cuts[other][place]
            for to in moves[axis][code[axis]]:
                target = number.get((*code[:axis], to, *code[axis + 1 :]))
                if target is not None and _nests(among[source], per_axis[axis][to], axis):
                    found.append((source, target, (axis, code[axis], to, others)))
    return _reachable(among, found, per_axis, produced, needed)


def _axis_moves(places: Sequence[Placement], wanted: Collection[Placement], differentiable: bool) -> list[list[int]]:
    """Per placement on one axis the numbers of those that it may become."""
    return [
        [
            to
            for to, target in enumerate(places)
            if conversion(source, target, differentiable) is not None
            and not (target not in wanted and isinstance(target, Shard | Partial))
        ]
        for source in places
    ]


def _nests(source: Placements, target: Placement, axis: int) -> bool:
    """As `rules.conversions.nests`, for a source and what one axis becomes."""
    for mine in (source[axis], target):
        if type(mine) is Shard:
            for other in source[axis + 1 :]:
                if type(other) is Shard and (mine.dim, mine.parts) == (other.dim, other.parts):
                    return False
    return True


def _reachable(
    among: Sequence[Placements],
    found: Sequence[tuple[int, int, tuple[int, int, int, int]]],
    per_axis: Sequence[Sequence[Placement]],
    produced: Collection[Placements],
    needed: Collection[Placements],
) -> Routes:
    """Without the states that no production reaches or that lead to no need."""
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for source, target, _ in found:
        after.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    start = {index for index, state in enumerate(among) if state in produced}
    end = {index for index, state in enumerate(among) if state in needed}
    kept = sorted((_closure(start, after) & _closure(end, before)) | start | end)
    number = {old: new for new, old in enumerate(kept)}
    prices: dict[tuple[int, int, int, int], int] = {}
    examples: list[int] = []
    steps: list[tuple[int, int, int]] = []
    for source, target, key in found:
        if source in number and target in number:
            if key not in prices:
                prices[key] = len(examples)
                examples.append(len(steps))
            steps.append((number[source], number[target], prices[key]))
    changes = tuple((axis, per_axis[axis][a], per_axis[axis][b], parts) for axis, a, b, parts in prices)
    return Routes(tuple(among[old] for old in kept), tuple(steps), changes, tuple(examples))


def _closure(start: Collection[int], edges: Mapping[int, list[int]]) -> set[int]:
    seen, pending = set(start), list(start)
    while pending:
        for other in edges.get(pending.pop(), ()):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return seen
