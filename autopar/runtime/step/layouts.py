"""Layouts of tensors in memory, for forwards that ask (``x.is_contiguous()``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

STRIDED = (-1,)
"""The layout of a tensor with gaps, or of one that shares elements."""


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of memory; empty for a contiguous tensor."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else STRIDED


def empty_of(shape: Sequence[Any], layout: tuple[int, ...], **options: Any) -> Tensor:
    """Return an empty tensor of a shape in a layout."""
    if layout == STRIDED:
        return torch.empty((*shape, 2), **options)[..., 0]
    if layout:
        return torch.empty([shape[dim] for dim in layout], **options).permute([layout.index(dim) for dim in range(len(layout))])
    return torch.empty(tuple(shape), **options)
