"""What torch's own modules ask of data only to be faster: while a model is traced, they get an answer that is always right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
