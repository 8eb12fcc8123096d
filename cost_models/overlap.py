"""What may travel while the main stream computes: a property of the software that runs the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Overlap:
    """`contention` is the share of its speed that the main stream loses while a transfer runs behind it (collectives take
    multiprocessors and memory bandwidth). Without `reductions_behind` gradients are reduced when a backward has ended, without
    `gathers_behind` weights are gathered when they are needed. With `sends_block` a stage waits until what it sends has left;
    with `sends_scattered` each rank of a model axis sends its part of what they have in common.
    With `model_behind` collectives of model axes, and of attention over parts of a sequence, run in parts behind the computing
    beside them; with `experts_behind` what experts exchange hides there too. With `reductions_queue` gradients have buffers of
    their own and queue for their reduction, so that no backward waits for one (autopar's own programs do none of the three).
    """

    contention: float = 0.0
    reductions_behind: bool = True
    gathers_behind: bool = True
    sends_block: bool = False
    sends_scattered: bool = False
    model_behind: bool = False
    experts_behind: bool = False
    reductions_queue: bool = False

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Overlap:
        """ValueError where a share is none."""
        found = Overlap(float(data.get("contention", 0.0)), *(bool(data.get(name, default)) for name, default in _FLAGS))
        if not 0 <= found.contention < 1:
            raise ValueError(f"overlap: contention is {found.contention}, not a share")
        return found


_FLAGS = (
    ("reductions_behind", True),
    ("gathers_behind", True),
    ("sends_block", False),
    ("sends_scattered", False),
    ("model_behind", False),
    ("experts_behind", False),
    ("reductions_queue", False),
)
