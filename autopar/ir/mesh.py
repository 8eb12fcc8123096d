"""The device mesh: named axes, outermost first, ranks in row-major order."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from autopar.ir.names import Name

DATA_AXIS = "dp"
PIPELINE_AXIS = "pp"
"""Of pipeline stages, which are meshes of their own: outside of every `Mesh`."""
MODEL_AXES = ("tp", "tp2")
EXPERT_AXIS = "ep"
"""A model axis that may shard the batch too: experts are sharded over it, and all else is data parallel on the same ranks."""
CONTEXT_AXIS = "cp"
"""The data ranks of a variant with fewer examples than they are, where they shard sequences instead (context parallelism): a
model axis on which weights are as on the data axis, replicated, with gradients that are partial sums."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis."""

    name: Name
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes, outermost first: ranks that differ on the last axis only are neighbours. Axes of size 1 may be present.

    The data axis (`DATA_AXIS`) shards the batch and, with ZeRO, the state; every other axis is a model axis.
    """

    axes: tuple[Axis, ...]
    _sizes: tuple[int, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = self._sizes
        if sizes is None:
            sizes = tuple(axis.size for axis in self.axes)
            object.__setattr__(self, "_sizes", sizes)
        return sizes

    def index(self, name: str) -> int:
        return self.names.index(name)

    def size_of(self, name: str) -> int:
        """The size of the axis; 1 where the mesh has no axis of that name."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of `rank`, one per axis."""
        out: list[int] = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            out.append(coordinate)
        return tuple(reversed(out))

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes)
