"""One mesh axis as this rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..compat.collectives import coordinate_in


@dataclass(frozen=True)
class AxisHandle:
    """A mesh axis as this rank sees it. `coordinate` is its place on the axis; `group_name` is empty where the axis has one rank.
    `shares`: the examples of each rank, where the axis shards the batch unevenly. `slots`: where a block has its experts in
    another order than the model, the slot of each expert, and of dropped copies (`experts.placement`)."""

    name: str
    size: int = 1
    coordinate: int = 0
    group_name: str = ""
    shares: tuple[int, ...] = ()
    slots: torch.Tensor | None = field(default=None, compare=False)

    def divides(self, extent: int) -> bool:
        """Return whether the axis can shard a dimension of this size."""
        return extent % (sum(self.shares) or self.size) == 0

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a dimension that the axis `divides`. A view."""
        if not self.shares:
            return x.chunk(self.size, dim)[self.coordinate]
        each = x.shape[dim] // sum(self.shares)
        return x.narrow(dim, each * sum(self.shares[: self.coordinate]), each * self.shares[self.coordinate])

    def span(self, local: int, like: torch.Tensor) -> tuple[int | torch.Tensor, int]:
        """Return where this rank's `local` elements of a dimension begin that the axis shards, and how many all ranks have. The
        first is as `place_in` says."""
        if not self.shares:
            return place_in(self.group_name, self.coordinate, like) * local, self.size * local
        each = local // self.shares[self.coordinate]
        return each * sum(self.shares[: self.coordinate]), each * sum(self.shares)


def place_in(group: str, coordinate: int, like: torch.Tensor) -> torch.Tensor | int:
    """Return this rank's coordinate on the axis of a group, for tensors on the device of `like`. In compiled code it is known
    when that runs, so that the ranks of the axis have one graph."""
    if group and torch.compiler.is_compiling():
        return _coordinate(like, group)  # type: ignore[no-any-return]
    return coordinate


@torch.library.custom_op("autopar::coordinate", mutates_args=())
def _coordinate(like: torch.Tensor, group: str) -> torch.Tensor:
    return torch.full((), coordinate_in(group), device=like.device)  # filled there: a copy would wait for the device


@_coordinate.register_fake
def _(like: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=like.device)


def shares_of(batch: int, ranks: int) -> tuple[int, ...]:
    """The examples of each rank: 7 over 4 are 2, 2, 2, 1."""
    least, more = divmod(batch, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))
