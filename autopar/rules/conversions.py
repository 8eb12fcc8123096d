"""Placement conversions (redistribute): what each communicates forward and backward, and which ones a mesh allows.

The table is that of DTensor, with `Invariant` beside it (Megatron's f and g are Invariant -> Replicate and Partial -> Invariant).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from autopar.ir.dims import Shape
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard


@dataclass(frozen=True, slots=True)
class AxisConversion:
    """The work of a conversion on its axis, forward and backward.

    ``all_gather reduce_scatter all_reduce all_to_all`` communicate; ``slice`` (keep this rank's chunk), ``pad`` (zeros around
    the chunk), ``mask`` (keep on coordinate 0, zeros elsewhere), ``scale`` (divide by the axis size) are local; None is free.
    """

    forward: str | None
    backward: str | None

    @property
    def communicates(self) -> bool:
        return any(kind in COLLECTIVES for kind in (self.forward, self.backward))


COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})

_SUM_TABLE: dict[tuple[type[Placement], type[Placement]], AxisConversion] = {
    (Shard, Replicate): AxisConversion("all_gather", "reduce_scatter"),
    (Shard, Invariant): AxisConversion("all_gather", "slice"),
    (Shard, Shard): AxisConversion("all_to_all", "all_to_all"),
    (Shard, Partial): AxisConversion("pad", "slice"),
    (Partial, Replicate): AxisConversion("all_reduce", "all_reduce"),
    (Partial, Invariant): AxisConversion("all_reduce", None),
    (Partial, Shard): AxisConversion("reduce_scatter", "all_gather"),
    (Invariant, Replicate): AxisConversion(None, "all_reduce"),
    (Invariant, Shard): AxisConversion("slice", "all_gather"),
    (Invariant, Partial): AxisConversion("mask", None),
    (Replicate, Shard): AxisConversion("slice", "pad"),
    (Replicate, Invariant): AxisConversion(None, "scale"),
    (Replicate, Partial): AxisConversion("mask", "mask"),
}


def axis_conversion(source: Placement, target: Placement, differentiable: bool) -> AxisConversion | None:
    """The direct conversion on one axis; None where there is none, or source and target are equal.

    Without a gradient the backward is None and `Invariant` does not occur. A maximum or minimum is reduced to `Replicate` only.
    """
    if source == target:
        return None
    kinds = type(source), type(target)
    if not differentiable and Invariant in kinds:
        return None
    if Partial in kinds and any(isinstance(place, Partial) and place.op != "sum" for place in (source, target)):
        return AxisConversion("all_reduce", None) if isinstance(source, Partial) and target == Replicate() else None
    found = _SUM_TABLE.get(kinds)
    return found if found is None or differentiable else AxisConversion(found.forward, None)


def may_convert(source: Placements, target: Placement, axis: int) -> bool:
    """Return whether `axis` may change to `target` while the other axes stay as they are.

    Where two axes shard one dimension with equal `parts`, the later axis shards the chunks of the earlier one; so only the later
    one may be converted from or to that shard while the other has it.
    """
    for place in (source[axis], target):  # asked for every edge of every conversion graph: plain loops
        if type(place) is Shard:
            for other in source[axis + 1 :]:
                if type(other) is Shard and (place.dim, place.parts) == (other.dim, other.parts):
                    return False
    return True


def changed_axis(source: Placements, target: Placements) -> int:
    """The index of the one axis in which two placements differ. ValueError where they differ in none or in several."""
    axes = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if a is not b and a != b]
    if len(axes) != 1:
        raise ValueError(f"a conversion changes one axis, not {len(axes)}")
    return axes[0]


def placement_states(
    shape: Shape, ends: Iterable[Placements], axis_sizes: Sequence[int], differentiable: bool
) -> tuple[Placements, ...]:
    """The placements that a chain of conversions between `ends` may visit: all combinations of what `ends` have on each axis that
    divide."""
    per_axis: list[dict[Placement, None]] = [{} for _ in axis_sizes]
    for placements in ends:
        for seen, placement in zip(per_axis, placements, strict=True):
            seen[placement] = None
    return tuple(
        state
        for state in product(*per_axis)
        if can_shard(shape, state, axis_sizes) and (differentiable or Invariant() not in state)
    )
