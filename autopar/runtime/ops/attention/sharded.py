"""Attention under a band (causal, sliding window): on the whole sequence, on a shard of the queries, or on a shard of the heads.

Arguments are those of ``scaled_dot_product_attention``, queries [B, h, s, d], and `window` ``(left, right)``: a query at position
p sees the keys from ``p - left`` to ``p + right``; -1 is unbounded. No mask of the size of the scores is made. There is no
dropout here: attention with dropout is never planned with these strategies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...compat.autograd import apply
from ...device.axis import AxisHandle
from .merge import AttentionGradients, AttentionTile, MergedAttention
from .rectangles import BANDED, Band, Rectangle

Window = tuple[int, int]


def band_of(is_causal: bool, window: Window | None) -> Band:
    """The band of a causal mask and a window together."""
    left, right = (None, None) if window is None else (None if size < 0 else size for size in window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of the scores: ``1 / sqrt(d)`` where none is given."""
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def four_dims(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask with four dimensions."""
    return None if mask is None else mask.view(*(1,) * (4 - mask.dim()), *mask.shape)


class _Local(torch.autograd.Function):
    """The queries of a tile on its keys, all on this rank."""

    @staticmethod
    def forward(
        ctx: Any, tile: AttentionTile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.tile = tile
        merged = MergedAttention.empty(q, v.shape[-1])
        merged.add(tile.with_mask(mask), k, v)
        out, lse = merged.finish()
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        gradients = AttentionGradients.zero(grad, q, out, lse, mask if ctx.needs_input_grad[-1] else None)
        to_k, to_v = gradients.add(ctx.tile.with_mask(mask), k, v)
        return None, gradients.to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), gradients.to_mask


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return ``scaled_dot_product_attention`` with windows, on the whole sequence."""
    return attention_rows(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, window=window, axis=AxisHandle(""))


def attention_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Queries sharded on `axis` [B, h, s/n, d], as are the rows of the mask; keys and values whole. Rank i has the i-th part of
    the rows, and computes on the keys that they see: with causal attention the last rank computes most."""
    assert not dropout_p
    rows, columns, mask = q.shape[2], k.shape[2], four_dims(attn_mask)
    queries, keys = ((axis.coordinate * rows, rows),), ((0, columns),)
    tile = AttentionTile(queries, keys, band_of(is_causal, window), scale_of(q, scale))
    if q.is_cuda and mask is not None:
        return attention_masked(tile.with_mask(mask), q, k, v)
    return apply(_Local, tile, q, k, v, mask)  # type: ignore[no-any-return]


def attention_masked(tile: AttentionTile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own attention under a mask of all scores: on CUDA no kernel that returns the log-sum-exp takes every mask, and one
    product of masked scores is faster than several by plain operations."""
    whole = Rectangle((0, q.shape[2]), (0, k.shape[2]), BANDED, tile.rows[0][0] - tile.columns[0][0])
    bias, _ = tile.bias(whole, q)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=tile.scale, enable_gqa=k.shape[1] != q.shape[1])


def attention_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Query heads sharded on `axis` [B, h/n, s, d], keys and values of all their heads on every rank (their number does not
    divide by n): a rank computes on those that its query heads read. Gradients of k and v are partial sums."""
    heads, all_heads = q.shape[1], k.shape[1]
    each = heads * axis.size // all_heads
    first = axis.coordinate * heads
    if heads % each == 0 or each % heads == 0:
        wanted = slice(first // each, first // each + max(1, heads // each))
        k, v = k[:, wanted], v[:, wanted]
    else:
        index = torch.arange(first, first + heads, device=q.device) // each
        k, v = k.index_select(1, index), v.index_select(1, index)
    grouped = k.shape[1] != heads
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    return attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped, window=window)
