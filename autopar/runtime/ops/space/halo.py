"""Halo exchange: rows of the neighbours' shards beside this rank's own, and the gradients of these rows back to their owners.

Rank r of the axis holds the r-th of n equal shards of dimension `dim`. It sends its first `after` rows to rank r - 1 and its last
`before` rows to rank r + 1. Beyond the first and the last shard there is what the operation pads with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...compat.autograd import apply
from ...compat.collectives import all_to_all_rows, wait_tensor
from ...device.axis import AxisHandle


@dataclass(frozen=True, slots=True)
class Halo:
    """`before` and `after` rows of dimension `dim` beside the shard of rank `coordinate` of `size`; `fill` lies beyond
    the image (None: its outermost row once more)."""

    dim: int
    before: int
    after: int
    size: int
    coordinate: int
    group: str
    fill: float | None = 0.0

    @staticmethod
    def on(axis: AxisHandle, dim: int, before: int, after: int, fill: float | None = 0.0) -> Halo:
        """The halo of this rank on a mesh axis."""
        return Halo(dim, before, after, axis.size, axis.coordinate, axis.group_name, fill)

    @property
    def first(self) -> bool:
        """Whether this rank has the first shard."""
        return self.coordinate == 0

    @property
    def last(self) -> bool:
        """Whether this rank has the last shard."""
        return self.coordinate == self.size - 1

    def exchange(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The `before` rows of the shard before, and the `after` rows of the one after."""
        rows = x.shape[self.dim]
        upwards, downwards = x.narrow(self.dim, 0, self.after), x.narrow(self.dim, rows - self.before, self.before)
        above, below = self._swap(upwards, downwards, self.before, self.after)
        return self._filled(above, x, self.before, 0), self._filled(below, x, self.after, rows - 1)

    def give_back(self, above: torch.Tensor, below: torch.Tensor, own: torch.Tensor) -> None:
        """Adds the neighbours' gradients of this rank's rows to `own`, the gradient of its shard; `above` and `below` are its
        gradients of theirs."""
        rows = own.shape[self.dim]
        to_first, to_last = self._swap(above, below, self.after, self.before)
        if to_first is not None:
            own.narrow(self.dim, 0, self.after).add_(to_first)
        elif self.fill is None and self.before:
            own.narrow(self.dim, 0, 1).add_(above.sum(self.dim, keepdim=True))
        if to_last is not None:
            own.narrow(self.dim, rows - self.before, self.before).add_(to_last)
        elif self.fill is None and self.after:
            own.narrow(self.dim, rows - 1, 1).add_(below.sum(self.dim, keepdim=True))

    def padded(self, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The shard between `rows`."""
        return torch.cat((rows[0], x, rows[1]), self.dim)

    def _filled(self, found: torch.Tensor | None, x: torch.Tensor, count: int, edge: int) -> torch.Tensor:
        """`found`, or `count` rows of what lies beyond the image."""
        if found is not None:
            return found
        shape = [*x.shape[: self.dim], count, *x.shape[self.dim + 1 :]]
        return x.narrow(self.dim, edge, 1).expand(shape) if self.fill is None else x.new_full(shape, self.fill)

    def _swap(
        self, up: torch.Tensor, down: torch.Tensor, from_above: int, from_below: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sends `up` to the rank before and `down` to the one after; the rows received from each (None: there is none)."""
        if self.size == 1:
            return None, None
        shape = list(up.shape)
        row = up.numel() // up.shape[self.dim] if up.shape[self.dim] else down.numel() // max(1, down.shape[self.dim])
        send, receive = [0] * self.size, [0] * self.size
        parts = []
        if not self.first:
            send[self.coordinate - 1], receive[self.coordinate - 1] = up.numel(), from_above * row
            parts.append(up.reshape(-1))
        if not self.last:
            send[self.coordinate + 1], receive[self.coordinate + 1] = down.numel(), from_below * row
            parts.append(down.reshape(-1))
        flat = wait_tensor(all_to_all_rows(torch.cat(parts), receive, send, self.group))
        above, below = flat.split([sum(receive[: self.coordinate]), sum(receive[self.coordinate :])])
        sides = []
        for part, count, beyond in ((above, from_above, self.first), (below, from_below, self.last)):
            shape[self.dim] = count
            sides.append(None if beyond else part.view(shape))
        return sides[0], sides[1]


class _WithHalo(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, x: torch.Tensor) -> torch.Tensor:
        ctx.halo, ctx.rows = halo, x.shape[halo.dim]
        return halo.padded(x, halo.exchange(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, split_gradient(ctx.halo, grad, ctx.rows)


def split_gradient(halo: Halo, grad: torch.Tensor, rows: int) -> torch.Tensor:
    """The gradient of the shard of `rows` rows, from that of the shard with its halo."""
    above, own, below = grad.split([halo.before, rows, halo.after], halo.dim)
    own = torch.clone(own)
    halo.give_back(above, below, own)
    return own


def with_halo(x: torch.Tensor, halo: Halo) -> torch.Tensor:
    """The shard with the neighbours' rows. Differentiable."""
    if not halo.before and not halo.after:
        return x
    return apply(_WithHalo, halo, x)  # type: ignore[no-any-return]
