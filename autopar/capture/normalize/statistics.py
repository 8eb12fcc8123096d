"""A deviation or variance with its mean, as two operations: torch's own decomposition is made of ``prims``, which have no rules.
These functions take the place of torch's operations when an exported program is taken apart (`tracing.decomposition`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Dims = list[int] | None


def statistics() -> Mapping[Any, Callable[..., Any]]:
    """Return the operations of torch, each with the function that takes its place."""
    return {torch.ops.aten.std_mean.correction: std_mean, torch.ops.aten.var_mean.correction: var_mean}


def std_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.std_mean``."""
    return x.std(dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim=keepdim)


def var_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``torch.var_mean``."""
    return x.var(dim, correction=correction, keepdim=keepdim), x.mean(dim, keepdim=keepdim)
