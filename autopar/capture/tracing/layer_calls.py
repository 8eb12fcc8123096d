"""The call of a layer: equal layers are left out of a trace only where all are called alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The shape of an argument. Its symbols are read when calls are compared: the first layer may have told that two batches,
    which were two symbols until then, are one."""

    shape: torch.Size


def call_words(arguments: Sequence[Any]) -> list[Any]:
    """A description that can be compared, by what is known of symbols now."""
    return [
        tuple(str(tuple(map(str, each.shape))) if isinstance(each, _Sizes) else each for each in item)
        if isinstance(item, tuple)
        else item
        for item in arguments
    ]


def describe(leaves: Sequence[Any], structure: Any) -> list[Any] | None:
    """Everything about a call but the values of its tensors; None where an argument is of a type that may hold more."""
    places: dict[int, int] = {}
    shown: list[Any] = [structure, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            same = places.setdefault(id(leaf), len(places))
            shown.append((same, _Sizes(leaf.shape), leaf.dtype, str(leaf.device), leaf.is_leaf and leaf.requires_grad))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            shown.append((type(leaf), leaf))
        else:
            return None
    return shown
