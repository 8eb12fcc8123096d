"""Expert load: how many copies of tokens each expert gets, recorded while somebody asks, in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..compat.autograd import in_backward


@dataclass(frozen=True)
class ComputedCopies:
    """The work of this rank in one call: the `copies` of its experts, which are in the slots from `first` on of `total`. `slots`:
    the slot of each expert where that is not its number."""

    first: int
    total: int
    copies: tuple[int, ...]
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class MeasuredExpertLoad:
    """The load of one call over all ranks: copies by rank, and by expert. An expert that several ranks compute, each a part of
    its copies, counts all of them."""

    by_rank: tuple[int, ...]
    by_expert: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The load of the most loaded rank over the mean."""
        return max(self.by_rank) * len(self.by_rank) / max(1, sum(self.by_rank))


_recorded: ContextVar[list[ComputedCopies] | None] = ContextVar("recorded_copies", default=None)


def record_copies(first: int, total: int, bounds: Sequence[int], slots: torch.Tensor | None = None) -> None:
    """Record a call of experts; `bounds` are running sums of copies."""
    recorded = _recorded.get()
    if recorded is not None and not in_backward():  # recomputation in the backward was recorded in the forward
        copies = tuple(b - a for a, b in zip((0, *bounds[:-1]), bounds, strict=True))
        recorded.append(ComputedCopies(first, total, copies, slots))


@contextmanager
def recording_copies() -> Iterator[list[ComputedCopies]]:
    """A context in which calls are recorded in the list."""
    recorded: list[ComputedCopies] = []
    before = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(before)


@contextmanager
def expert_load(device: torch.device | str, times: int) -> Iterator[list[MeasuredExpertLoad]]:
    """A context whose list has, once it ends, the load of each mixture of experts in the step that ran inside, in `times`
    micro-batches. All ranks enter it."""
    loads: list[MeasuredExpertLoad] = []
    with recording_copies() as recorded:
        yield loads
    loads += gather_expert_load(recorded, device, times)


def gather_expert_load(
    recorded: Sequence[ComputedCopies], device: torch.device | str, times: int = 1
) -> list[MeasuredExpertLoad]:
    """The loads of all ranks, each of which recorded the same calls, all of them `times` in a row (micro-batches). All must
    call."""
    out = []
    ranks, rank, several = dist.get_world_size(), dist.get_rank(), len(recorded) // times
    for number in range(several):
        table = torch.zeros(ranks, recorded[number].total, dtype=torch.int64, device=device)
        for call in recorded[number::several]:
            table[rank, call.first : call.first + len(call.copies)] += torch.tensor(call.copies, device=device)
        dist.all_reduce(table)
        if (slots := recorded[number].slots) is not None:
            table = table[:, slots[:-1]]
        out.append(MeasuredExpertLoad(tuple(table.sum(1).tolist()), tuple(table.sum(0).tolist())))
    return out
