"""The graph of placement conversions of a value, in which shortest ways and trees are searched for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from autopar.ir.dims import Shape
from autopar.ir.placement import Placements, can_shard
from autopar.rules.conversions import axis_conversion, may_convert


def single_axis_conversions(
    shape: Shape, among: Collection[Placements], axis_sizes: Sequence[int], differentiable: bool
) -> Iterator[tuple[Placements, Placements]]:
    """The edges of the conversion graph: the legal conversions of one axis between placements of a value of this global shape."""
    legal = {state: None for state in among if can_shard(shape, state, axis_sizes)}
    per_axis = [dict.fromkeys(state[axis] for state in legal) for axis in range(len(axis_sizes))]
    for source in legal:
        for axis, choices in enumerate(per_axis):
            for placement in choices:
                target = (*source[:axis], placement, *source[axis + 1 :])
                if target not in legal or axis_conversion(source[axis], placement, differentiable) is None:
                    continue
                if may_convert(source, placement, axis):
                    yield source, target
