"""What torch's own modules ask of data only to be faster: while a model is traced, they get an answer that is always right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import transformer


@contextmanager
def masks_are_not_read() -> Iterator[None]:
    """``nn.TransformerEncoder`` compares its mask with a causal one, to say so to the kernel beside the mask. It is said where
    the caller does; the mask counts in any case, and `normalize.masks` finds causal ones."""
    before = transformer._detect_is_causal_mask

    def told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


@contextmanager
def to_the_same_device() -> Iterator[None]:
    """``submodule.to(device)`` in a forward, where it is there already: torch would swap parameters that are being traced."""
    before = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        if dtype is None and device is not None and all(tensor.device == device for tensor in tensors):
            return self
        return before(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = before  # type: ignore[method-assign]
