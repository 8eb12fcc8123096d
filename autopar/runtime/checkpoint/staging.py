"""What an asynchronous save takes from the steps beside it: copies on the host, and the priority of the thread that writes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

_NICER = 15
"""Linux: a thread that is nicer by so much gets a thirtieth of a core that a step wants, and all of one that nobody wants."""


class HostCopies:
    """Host memory that stays from one asynchronous save to the next: fresh pages take ten times the seconds of the copy."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of all, which hold until the next call."""
        if [_kind(each) for each in self.kept] != [_kind(each) for each in tensors]:
            self.kept = []  # freed before the others are made
            self.kept = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        for own, tensor in zip(self.kept, tensors, strict=True):
            own.copy_(tensor.detach())
        return self.kept


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def yield_to_others() -> None:
    """This thread computes only where the others of the machine leave a core. On other systems than Linux nothing."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICER))
