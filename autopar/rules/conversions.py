"""Conversions between placements (DESIGN section 3): what each costs forward and backward, and which are legal on a mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from autopar.ir.dims import Shape
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion does forward and backward on its axis.

    ``all_gather reduce_scatter all_reduce all_to_all`` communicate; ``slice`` (keep this rank's chunk), ``pad`` (zeros around
    the chunk), ``mask`` (keep on coordinate 0, zeros elsewhere), ``scale`` (divide by the axis size) are local; None is free.
    """

    forward: str | None
    backward: str | None

    @property
    def communicates(self) -> bool:
        return any(kind in COLLECTIVES for kind in (self.forward, self.backward))


COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})

_SUM_TABLE: dict[tuple[type[Placement], type[Placement]], Conversion] = {
    (Shard, Replicate): Conversion("all_gather", "reduce_scatter"),
    (Shard, Invariant): Conversion("all_gather", "slice"),
    (Shard, Shard): Conversion("all_to_all", "all_to_all"),
    (Shard, Partial): Conversion("pad", "slice"),
    (Partial, Replicate): Conversion("all_reduce", "all_reduce"),
    (Partial, Invariant): Conversion("all_reduce", None),
    (Partial, Shard): Conversion("reduce_scatter", "all_gather"),
    (Invariant, Replicate): Conversion(None, "all_reduce"),
    (Invariant, Shard): Conversion("slice", "all_gather"),
    (Invariant, Partial): Conversion("mask", None),
    (Replicate, Shard): Conversion("slice", "pad"),
    (Replicate, Invariant): Conversion(None, "scale"),
    (Replicate, Partial): Conversion("mask", "mask"),
}


def conversion(source: Placement, target: Placement, differentiable: bool) -> Conversion | None:
    """The direct conversion on one axis; None where there is none (or nothing to do).

    Without a gradient the backward is None and `Invariant` is not used. A maximum or minimum is reduced to `Replicate` only.
    """
    if source == target:
        return None
    if not differentiable and Invariant() in (source, target):
        return None
    if any(isinstance(place, Partial) and place.op != "sum" for place in (source, target)):
        return Conversion("all_reduce", None) if isinstance(source, Partial) and target == Replicate() else None
    found = _SUM_TABLE.get((type(source), type(target)))
    return found if found is None or differentiable else Conversion(found.forward, None)


def nests(source: Placements, target: Placements) -> bool:
    """Whether the one axis that changes may change while the others stay.

    Where two axes cut one dimension with equal `parts`, the later axis cuts within the earlier one's chunks, so only the later
    may be converted (from or to that cut) while both are there.
    """
    axis = changed_axis(source, target)
    later = source[axis + 1 :]
    return not any(
        isinstance(mine, Shard) and isinstance(other, Shard) and (mine.dim, mine.parts) == (other.dim, other.parts)
        for mine in (source[axis], target[axis])
        for other in later
    )


def changed_axis(source: Placements, target: Placements) -> int:
    """The one axis in which two placements differ. ValueError where they differ in none or in several."""
    axes = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a != b]
    if len(axes) != 1:
        raise ValueError(f"an arc changes one axis, not {len(axes)}")
    return axes[0]


def states(shape: Shape, ends: Iterable[Placements], axis_sizes: Sequence[int], differentiable: bool) -> tuple[Placements, ...]:
    """Every placement that a path between `ends` may visit: the product of what they use on each axis, where it divides."""
    per_axis: list[dict[Placement, None]] = [{} for _ in axis_sizes]
    for placements in ends:
        for seen, placement in zip(per_axis, placements, strict=True):
            seen[placement] = None
    return tuple(
        state
        for state in product(*per_axis)
        if can_shard(shape, state, axis_sizes) and (differentiable or Invariant() not in state)
    )


def arcs(
    shape: Shape, among: Collection[Placements], axis_sizes: Sequence[int], differentiable: bool
) -> Iterator[tuple[Placements, Placements]]:
    """Every legal single-axis arc between placements of a value of this global shape."""
    legal = {state: None for state in among if can_shard(shape, state, axis_sizes)}
    per_axis = [dict.fromkeys(state[axis] for state in legal) for axis in range(len(axis_sizes))]
    for source in legal:
        for axis, choices in enumerate(per_axis):
            for placement in choices:
                target = (*source[:axis], placement, *source[axis + 1 :])
                if target not in legal or conversion(source[axis], placement, differentiable) is None:
                    continue
                if nests(source, target):
                    yield source, target
