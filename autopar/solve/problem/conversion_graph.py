"""The graph of placement conversions (redistributions) of one value, without prices: every placement that lies on the way from a
production to a need, and the one-axis conversions between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Value
from autopar.ir.placement import Partial, Placement, Placements, Shard
from autopar.rules.conversions import axis_conversion, may_convert, placement_states
from autopar.solve.problem.pins import Pin

EdgeKey = tuple[int, Placement, Placement, int]
"""The key of a conversion's price: mesh axis, placements on it before and after, shards cut by the other axes."""


@dataclass(frozen=True, slots=True)
class ConversionGraph:
    """The conversions of a value: `states` are the vertices, `edges` (source state, target state, price number). Edges of one
    price number change the same mesh axis in the same way while the other axes cut the tensor into equally many shards;
    `price_keys` says so per price number, and `examples` is the first edge of each."""

    states: tuple[Placements, ...]
    edges: tuple[tuple[int, int, int], ...]
    price_keys: tuple[EdgeKey, ...]
    examples: tuple[int, ...]


def conversion_graph(
    value: Value,
    sizes: Sequence[int],
    produced: Collection[Placements],
    needed: Collection[Placements],
    pins: Mapping[int, Pin] | None = None,
) -> ConversionGraph:
    """All paths from any of `produced` to any of `needed` on a mesh of these axis sizes. No edge leads to a Partial or a Shard
    that nobody needs. `pins`, by axis: from partial sums edges lead to the pinned placement alone, needed or not."""
    pins = pins or {}
    pinned = [_with(at, axis, pin.place) for axis, pin in pins.items() for at in produced]
    among = placement_states(value.shape, (*produced, *needed, *pinned), sizes, value.differentiable)
    per_axis = [list(dict.fromkeys(state[axis] for state in among)) for axis in range(len(sizes))]
    targets = [
        _axis_targets(places, {at[axis] for at in (*needed, *pinned)}, value.differentiable, pins.get(axis))
        for axis, places in enumerate(per_axis)
    ]
    index = [{place: number for number, place in enumerate(places)} for places in per_axis]
    coded = [tuple(index[axis][place] for axis, place in enumerate(state)) for state in among]
    number = {code: position for position, code in enumerate(coded)}
    cuts = [[size if type(place) is Shard else 1 for place in places] for places, size in zip(per_axis, sizes, strict=True)]
    edges: list[tuple[int, int, tuple[int, int, int, int]]] = []
    for source, code in enumerate(coded):
        for axis in range(len(sizes)):
            other_shards = 1
            for other, place in enumerate(code):
                if other != axis:
                    other_shards *= cuts[other][place]
            for to in targets[axis][code[axis]]:
                target = number.get((*code[:axis], to, *code[axis + 1 :]))
                if target is not None and may_convert(among[source], per_axis[axis][to], axis):
                    edges.append((source, target, (axis, code[axis], to, other_shards)))
    return _reachable(among, edges, per_axis, produced, needed)


def _with(placements: Placements, axis: int, place: Placement) -> Placements:
    return (*placements[:axis], place, *placements[axis + 1 :])


def _axis_targets(
    places: Sequence[Placement], needed: Collection[Placement], differentiable: bool, pin: Pin | None
) -> list[list[int]]:
    """Return per placement on one axis the numbers of those that it may be converted to."""
    return [
        [
            to
            for to, target in enumerate(places)
            if axis_conversion(source, target, differentiable) is not None
            and not (target not in needed and isinstance(target, Shard | Partial))
            and not (pin is not None and isinstance(source, Partial) and not pin.allows(target))
        ]
        for source in places
    ]


def _reachable(
    among: Sequence[Placements],
    all_edges: Sequence[tuple[int, int, tuple[int, int, int, int]]],
    per_axis: Sequence[Sequence[Placement]],
    produced: Collection[Placements],
    needed: Collection[Placements],
) -> ConversionGraph:
    """The graph without states that no production reaches or that lead to no need."""
    after: dict[int, list[int]] = {}
    before: dict[int, list[int]] = {}
    for source, target, _ in all_edges:
        after.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    start = {index for index, state in enumerate(among) if state in produced}
    end = {index for index, state in enumerate(among) if state in needed}
    useful = sorted((_closure(start, after) & _closure(end, before)) | start | end)
    number = {old: new for new, old in enumerate(useful)}
    prices: dict[tuple[int, int, int, int], int] = {}
    examples: list[int] = []
    edges: list[tuple[int, int, int]] = []
    for source, target, key in all_edges:
        if source in number and target in number:
            if key not in prices:
                prices[key] = len(examples)
                examples.append(len(edges))
            edges.append((number[source], number[target], prices[key]))
    keys = tuple((axis, per_axis[axis][a], per_axis[axis][b], other_shards) for axis, a, b, other_shards in prices)
    return ConversionGraph(tuple(among[old] for old in useful), tuple(edges), keys, tuple(examples))


def _closure(start: Collection[int], edges: Mapping[int, list[int]]) -> set[int]:
    """Every state that is reached from these. By hand: `networkx.descendants` takes 2.7 times as long (Llama's block on four
    meshes), and every mesh of the search needs it for each tensor."""
    seen, pending = set(start), list(start)
    while pending:
        for other in edges.get(pending.pop(), ()):
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return seen
