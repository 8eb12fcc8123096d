"""What seeds devices that are not there."""

from __future__ import annotations

import torch


def seed_the_processor_alone() -> None:
    """From now on, on a machine without GPUs. For the time when one starts torch keeps the stack of each call that seeds it, with
    the lines of all files: a millisecond for each test, and for each ``torch.manual_seed``."""
    if not torch.cuda.is_available() and not torch.xpu.is_available():
        for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
            module._lazy_call = lambda *_, **__: None  # type: ignore[attr-defined]
