"""Attention with all its scores, and what named functions make of it on the ranks of one axis, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def allowed(queries: Tensor, keys: Tensor, causal: bool, window: Sequence[int] | None) -> Tensor:
    """Which key positions each query position sees."""
    distance = keys - queries.unsqueeze(1)
    left, right = window or (-1, -1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= 0) if causal else seen
    seen &= (distance >= -left) if left >= 0 else seen
    return seen & ((distance <= right) if right >= 0 else seen)


def dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False, window: Sequence[int] | None = None, first: int = 0,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` with a window; the queries begin at position `first`."""
    if k.dim() > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    seen = allowed(torch.arange(first, first + q.shape[-2]), torch.arange(k.shape[-2]), causal, window)
    if mask is not None:
        seen = mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)


def documents(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor, key_documents: Tensor, query_positions: Tensor | None = None,
    key_positions: Tensor | None = None, *, scale: float | None = None, enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Attention within documents; zeros for a query that sees no key."""
    seen = query_documents[:, None, :, None] == key_documents[:, None, None, :]
    if query_positions is not None and key_positions is not None:
        distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
        seen = seen & (distance >= 0) & (distance <= (distance.max() if window is None else window[0]))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -1e300).softmax(-1) * seen.any(-1, keepdim=True)
    return weights @ v


def rows(group: list[list[Any]], **named: Any) -> list[Tensor]:
    """Queries cut."""
    length = group[0][0].shape[-2]
    return [dense(*args, **named, first=rank * length) for rank, args in enumerate(group)]


def ring(group: list[list[Any]], **named: Any) -> list[Tensor]:
    """Queries, keys and values cut."""
    k, v = (torch.cat([args[index] for args in group], -2) for index in (1, 2))
    return rows([[args[0], k, v, *args[3:]] for args in group], **named)


def documents_ring(group: list[list[Any]], **named: Any) -> list[Tensor]:
    """Attention within documents; queries, keys and values cut, and their documents and positions."""
    keys = {index: torch.cat([args[index] for args in group], -2 if index < 3 else -1) for index in range(1, len(group[0]))}
    k, v = keys[1], keys[2]
    whole = [[keys[at] if at in (4, 6) else args[at] for at in range(3, len(args))] for args in group]
    return [documents(args[0], k, v, *more, **named) for args, more in zip(group, whole, strict=True)]


def heads(group: list[list[Any]], **named: Any) -> list[Tensor]:
    """Query heads cut."""
    out = []
    for rank, (q, k, v, *rest) in enumerate(group):
        each = len(group) * q.shape[1] // k.shape[1]
        own = [head // each for head in range(rank * q.shape[1], (rank + 1) * q.shape[1])]
        out.append(dense(q, k[:, own], v[:, own], *rest, **named))
    return out
