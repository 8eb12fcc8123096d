"""Attention under a band (causal, sliding windows), on the whole sequence or on some of its queries, and for some of its heads.

Arguments are those of ``scaled_dot_product_attention``, queries [B, h, s, d], and `window` ``(left, right)``: a query at position
p sees the keys from ``p - left`` to ``p + right``; -1 is without end. No mask of the size of the scores is made. Nothing is
dropped out: the strategies are not offered where attention has dropout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .apply import apply
from .attention_merge import Block, Gradients, Merged
from .attention_pieces import BANDED, Band, Piece, Spans
from .axis import AxisHandle

Window = tuple[int, int]


def band_of(is_causal: bool, window: Window | None) -> Band:
    """Both together."""
    left, right = (None, None) if window is None else (None if size < 0 else size for size in window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """``1 / sqrt(d)`` where none is given."""
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def four(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask with four dimensions."""
    return None if mask is None else mask.view(*(1,) * (4 - mask.dim()), *mask.shape)


class _Local(torch.autograd.Function):
    """Queries `rows` on keys `columns`, all here."""

    @staticmethod
    def forward(
        ctx: Any, rows: Spans, columns: Spans, band: Band, scale: float,
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.of = rows, columns, band, scale
        merged = Merged(q, v.shape[-1])
        merged.add(Block(rows, columns, band, scale, mask), k, v)
        out, lse = merged.finish()
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        gradients = Gradients(grad, q, out, lse, mask if ctx.needs_input_grad[-1] else None)
        rows, columns, band, scale = ctx.of
        to_k, to_v = gradients.add(Block(rows, columns, band, scale, mask), k, v)
        results = gradients.to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), gradients.to_mask
        return None, None, None, None, *results


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
) -> torch.Tensor:  # fmt: skip
    """The whole sequence: ``scaled_dot_product_attention`` that knows windows."""
    return attention_rows(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, window=window, axis=AxisHandle(""))


def attention_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Queries cut on `axis` [B, h, s/n, d], as are the rows of the mask; keys and values whole. Rank i has the i-th part of the
    rows, and computes on the keys that they see: with causal attention the last rank does most."""
    assert not dropout_p
    rows, columns, mask = q.shape[2], k.shape[2], four(attn_mask)
    place = ((axis.coordinate * rows, rows),), ((0, columns),), band_of(is_causal, window), scale_of(q, scale)
    if q.is_cuda and mask is not None:
        return at_once(Block(*place, mask), q, k, v)
    return apply(_Local, *place, q, k, v, mask)  # type: ignore[no-any-return]


def at_once(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """By torch's own attention under a mask of all scores: on CUDA no kernel that tells the log-sum-exp takes every mask, and one
    product of masked scores is faster than several by plain maths."""
    whole = Piece((0, q.shape[2]), (0, k.shape[2]), BANDED, block.rows[0][0] - block.columns[0][0])
    bias, _ = block.bias(whole, q)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=block.scale, enable_gqa=k.shape[1] != q.shape[1])


def attention_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Query heads cut on `axis` [B, h/n, s, d], keys and values of all their heads on every rank (their number does not divide
    by n): a rank computes on those that its query heads read. Gradients of k and v are partial sums."""
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
