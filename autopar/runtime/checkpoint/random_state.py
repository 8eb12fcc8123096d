"""The random state of a run: the generators of torch, Python and numpy on each rank, and the random streams of the program."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointProblem

Generators = dict[str, Any]
"""The state of each generator of a process by its name."""


def generators(device: torch.device) -> Generators:
    """Return the generators of this process: torch's of the CPU and of the device, Python's, and numpy's where it is imported."""
    version, numbers, left = random.getstate()
    states: Generators = {"torch": torch.default_generator.get_state(), "python": [version, torch.tensor(numbers), left]}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).clone()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *more = numpy.random.get_state()
        states["numpy"] = [str(kind), torch.tensor(keys.tolist()), *map(float, more)]
    return states


def set_generators(states: Mapping[str, Any], device: torch.device, different: int = 0) -> None:
    """The inverse. `different`: other than 0, torch's and Python's begin at a state of their own that is derived from it."""
    try:
        torch.set_rng_state(states["torch"])
        version, numbers, left = states["python"]
        random.setstate((version, tuple(numbers.tolist()), left))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and "numpy" in states:
            kind, keys, place, has_gauss, gauss = states["numpy"]
            state = (kind, numpy.asarray(keys.tolist(), dtype="uint32"), int(place), int(has_gauss), gauss)
            numpy.random.set_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointProblem(f"the random state of the checkpoint does not fit ({error}): save it with this torch") from None
    if different:
        number = int.from_bytes(hashlib.sha256(bytes(states["torch"].tolist())).digest()[:6], "big") + different
        torch.manual_seed(number)
        random.seed(number)


@dataclass
class RandomState:
    """The random state of all ranks. `states`: those that differ; `of_rank`: which of them each rank has. `seed`, `place`: of the
    streams of the program (`device.rng`); under another mesh shards have other streams, from that place on too."""

    states: list[Generators]
    of_rank: list[int]
    seed: int | None
    place: int

    @staticmethod
    def of_all(every: Sequence[Generators], seed: int | None, place: int) -> RandomState:
        """Join the generators of all ranks."""
        digests = [_digest(state) for state in every]
        distinct = list(dict.fromkeys(digests))
        states = [every[digests.index(digest)] for digest in distinct]
        return RandomState(states, [distinct.index(digest) for digest in digests], seed, place)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self.__dict__)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> RandomState:
        """The inverse."""
        place = value["place"] if "place" in value else max(value["counts"].values(), default=0)  # an older one: beyond its draws
        return RandomState(value["states"], value["of_rank"], value["seed"], place)

    def generators_of(self, rank: int) -> tuple[Generators, int]:
        """Return the generators that a rank goes on with, and `different` of `set_generators`: its own state; where all ranks had
        one, that; else ranks that there were not get a state of their own."""
        if len(self.states) == 1:
            return self.states[0], 0
        if rank < len(self.of_rank):
            return self.states[self.of_rank[rank]], 0
        return self.states[0], rank

    def moved(self, size: int) -> bool:
        """Return whether ranks had different states, and there are other ranks now."""
        return len(self.states) > 1 and size != len(self.of_rank)


def _digest(value: Any) -> str:
    if isinstance(value, dict):
        return hashlib.sha256("".join(f"{key}{_digest(each)}" for key, each in value.items()).encode()).hexdigest()
    if isinstance(value, (list, tuple)):
        return _digest(dict(enumerate(value)))
    text = repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()
