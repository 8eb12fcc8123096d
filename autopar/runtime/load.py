"""How many copies of tokens each expert got: noted while somebody asks, in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .compat import in_backward


@dataclass(frozen=True)
class Computed:
    """What this rank computed in one call: `copies` of its experts, the first of which is number `first` of `total`."""

    first: int
    total: int
    copies: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """One call on all ranks: copies by rank, and of each expert; one that several ranks compute, each a part, counts for each."""

    by_rank: tuple[int, ...]
    by_expert: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The most loaded rank over the mean."""
        return max(self.by_rank) * len(self.by_rank) / max(1, sum(self.by_rank))


_noted: ContextVar[list[Computed] | None] = ContextVar("noted", default=None)


def note(first: int, total: int, bounds: Sequence[int]) -> None:
    """Called at every call of experts; `bounds` are running sums of copies."""
    noted = _noted.get()
    if noted is not None and not in_backward():  # what the backward runs again was noted before
        noted.append(Computed(first, total, tuple(b - a for a, b in zip((0, *bounds[:-1]), bounds, strict=True))))


@contextmanager
def noting() -> Iterator[list[Computed]]:
    """Inside, calls are noted in the list."""
    noted: list[Computed] = []
    before = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(before)


def gather(noted: Sequence[Computed], device: torch.device | str, times: int = 1) -> list[Load]:
    """Of all ranks, each of which noted the same calls, all of them `times` one after another. All must call."""
    out = []
    ranks, rank, several = dist.get_world_size(), dist.get_rank(), len(noted) // times
    for number in range(several):
        table = torch.zeros(ranks, noted[number].total, dtype=torch.int64, device=device)
        for call in noted[number::several]:
            table[rank, call.first : call.first + len(call.copies)] += torch.tensor(call.copies, device=device)
        dist.all_reduce(table)
        out.append(Load(tuple(table.sum(1).tolist()), tuple(table.sum(0).tolist())))
    return out
