"""The place in the data of a batch sampler: an epoch, and its batches that were yielded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch.utils.data import Sampler

from ..comm.agreement import Stated, require_agreement
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem, StateError
from ..step.same_batch import checksum

LONGEST = 2**31
"""The longest example, far beyond memory: sums of padded lengths do not overflow."""


class EpochSampler(Sampler[list[int]], ABC):
    """Yields indices of examples, a batch at a time. What an epoch has in its batches is drawn by the seed and the epoch."""

    def __init__(self, lengths: torch.Tensor, shuffle: bool, seed: int) -> None:
        """`lengths`: of every example, as `checked_lengths` returns them."""
        self.lengths, self.shuffle, self.seed, self.epoch, self.yielded = lengths, shuffle, seed, 0, 0
        self._start = 0

    @abstractmethod
    def batches(self) -> Sequence[list[int]]:
        """Return this rank's examples of all batches of this epoch, in order."""

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """Return the arguments, by name, that the batches of an epoch depend on beside the seed and the lengths."""

    def __iter__(self) -> Iterator[list[int]]:
        self.yielded, self._start = self._start, 0
        for examples in self.batches()[self.yielded :]:
            self.yielded += 1
            yield examples

    def drawn_order(self, generator: torch.Generator) -> torch.Tensor:
        """Return all examples in the order of this epoch."""
        count = len(self.lengths)
        return torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)

    def generator(self) -> torch.Generator:
        """Return the random numbers of this epoch."""
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the batches of this epoch next, from its first, or after `load_state_dict` of this epoch from that place."""
        if epoch != self.epoch:
            self.epoch, self.yielded, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of its batches that were yielded, and what their order depends on. Workers of a loader ask
        for batches ahead of training, which then counts its own steps: ``{**sampler.state_dict(), "yielded": steps}``."""
        return {"epoch": self.epoch, "yielded": self.yielded, "order": self.order()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches that were yielded, on any number of ranks."""
        order, places = state.get("order"), (state.get("epoch"), state.get("yielded"))
        if not isinstance(order, Mapping):
            raise StateError("this is not the state of a sampler by length: give load_state_dict what its state_dict returned")
        for name, value in self.order().items():
            if order.get(name) != value:
                raise StateError(
                    f"the sampler was saved with {name}={order.get(name)}, and has {name}={value}, which draws other "
                    "batches: make it with the same data and arguments (multiple= for the edges), or only call set_epoch"
                )
        epoch, yielded = (-1 if place is None or not hasattr(place, "__index__") else index(place) for place in places)
        self.epoch, before = max(epoch, 0), self.epoch
        if epoch < 0 or not 0 <= yielded <= len(self):
            self.epoch = before
            raise StateError(
                "the sampler was saved in epoch {!r} after {!r} batches, and an epoch has {}: count the batches of that epoch "
                "alone".format(*places, len(self))
            )
        self.yielded = self._start = yielded

    def order(self) -> dict[str, Any]:
        """Return what the batches of an epoch depend on, which all ranks must have alike."""
        lengths = {"examples": len(self.lengths), "lengths_checksum": checksum(self.lengths)}
        return {"seed": self.seed, "shuffle": self.shuffle, **self.sizes(), **lengths}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of this epoch."""


def require_one_sampler(sampler: EpochSampler, mesh: MeshHandle) -> None:
    """Raise MismatchProblem on all ranks where a rank's sampler draws other batches."""
    remedy = "give it the same data set, in the same order, and the same arguments on every rank"
    require_agreement({f"{name} of a sampler": Stated(str(x), remedy) for name, x in sampler.order().items()}, mesh.describe)


def checked_lengths(lengths: Iterable[int], dataset: Sized) -> torch.Tensor:
    """Return the lengths of the examples of a data set as int64. RuntimeProblem where they are not one positive integer each."""
    try:  # by way of Python's integers: torch has no minimum of unsigned ones, and takes no arrays of negative strides
        given = list(lengths.tolist() if hasattr(lengths, "tolist") else lengths)
        numbers = [index(length) for length in given]
    except (TypeError, ValueError, RuntimeError):
        given = numbers = [True]
    if any(isinstance(length, bool) for length in given):
        raise RuntimeProblem("lengths= takes one integer for each example: [len(example['input_ids']) for example in dataset]")
    if len(numbers) != len(dataset):
        raise RuntimeProblem(f"{len(numbers)} lengths for {len(dataset)} examples: give one for each, in their order")
    for length in (min(numbers), max(numbers)) if numbers else ():
        if not 1 <= length <= LONGEST:
            remedy = "leave out examples without tokens" if length < 1 else f"give lengths in tokens, of {LONGEST} at most"
            raise RuntimeProblem(f"example {numbers.index(length)} has length {length}: {remedy}")
    return torch.tensor(numbers, dtype=torch.int64)


def check_positive(**sizes: Any) -> None:
    """Raise RuntimeProblem where one is no positive integer."""
    for name, value in sizes.items():
        if not isinstance(value, Integral) or value < 1:
            raise RuntimeProblem(f"{name}={value}: give a positive integer")
