"""How a software keeps the state of training: which copies of weights and gradients live all step long, and how they change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class Keeping:
    """With `stored_compute` weights in the compute dtype live beside the masters (Megatron, DeepSpeed; ZeRO, arXiv 1910.02054,
    section 3.1); else they are made for the forward and dropped after the backward (FSDP2, and autopar's own programs).
    `gradient_bytes` per parameter (0: the master's), which is also what travels. `accesses` of master-sized tensors in the update
    (0: torch's foreach; a fused Adam reads gradient, weight and two moments, writes three of them and the compute copy: 7.5).
    With `update_copies` the update makes a temporary of the master's size for its part of the parameters (foreach; DeepSpeed's
    float32 copy of the gradients). With `owners_broadcast` ranks own whole tensors, and each owner broadcasts its own after the
    step (InternEvo), instead of one all-gather of equal shards."""

    stored_compute: bool = False
    gradient_bytes: int = 0
    accesses: float = 0.0
    update_copies: bool = True
    owners_broadcast: bool = False


@lru_cache(maxsize=1)
def keepings() -> Mapping[str, Keeping]:
    """Per software stack, from ``keeping.yaml``: facts of its code, nothing of it is fitted."""
    data = yaml.safe_load((Path(__file__).parent / "keeping.yaml").read_text())
    return {name: Keeping(**given) for name, given in data.items()}
