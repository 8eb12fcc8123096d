"""``torch.autocast`` around a call: the casts are part of the program, which runs without it."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def autocast_of(device_type: str) -> str:
    """The dtype of the active autocast of a device type (``bfloat16``), or an empty string."""
    if not torch.is_autocast_enabled(device_type):
        return ""
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def under_autocast(device_type: str, dtype: str) -> AbstractContextManager[object]:
    """Return a context with that autocast; without any where `dtype` is empty."""
    if not dtype:
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=getattr(torch, dtype))
