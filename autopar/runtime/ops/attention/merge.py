"""Attention of tiles, rectangle by rectangle: partial results are merged by their log-sum-exp (FlashAttention-2, arXiv
2307.08691, section 3.1.1), in float32 at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernels import LOWEST, Grads, attend, attend_backward, plain_backward, wide
from .rectangles import BANDED, CAUSAL, Band, Range, Rectangle, Spans, rectangles


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Keys and values of `columns` for queries of `rows`. `mask`: boolean, or added to the scores, [B or 1, h or 1, s or 1, T or
    1]; its rows are those of this tile, its columns all T of the sequence, in order."""

    rows: Spans
    columns: Spans
    band: Band
    scale: float
    mask: torch.Tensor | None = None

    def with_mask(self, mask: torch.Tensor | None) -> AttentionTile:
        """The tile under another mask."""
        return AttentionTile(self.rows, self.columns, self.band, self.scale, mask)

    def rectangles(self) -> tuple[Rectangle, ...]:
        """The rectangles to compute."""
        return rectangles(self.rows, self.columns, self.band)

    def mask_part(self, x: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        """The part of a tensor shaped like the mask for a rectangle."""
        x = x if x.shape[-2] == 1 else x[:, :, rectangle.rows[0] : rectangle.rows[1]]
        return x if x.shape[-1] == 1 else torch.cat([x[..., start:end] for start, end in self.key_ranges(rectangle)], -1)

    def key_ranges(self, rectangle: Rectangle) -> list[Range]:
        """The ranges of key positions of a rectangle."""
        out, at = [], 0
        for start, length in self.columns:
            first, last = max(rectangle.columns[0], at), min(rectangle.columns[1], at + length)
            out += [(start + first - at, start + last - at)] * (first < last)
            at += length
        return out

    def add_mask_gradient(self, total: torch.Tensor, rectangle: Rectangle, scores: torch.Tensor) -> None:
        """Adds a rectangle's gradient of the scores to a tensor shaped like the mask."""
        at = 0
        for start, end in self.key_ranges(rectangle):
            part = scores[..., at : at + end - start]
            rows = total if total.shape[-2] == 1 else total[:, :, rectangle.rows[0] : rectangle.rows[1]]
            where = rows if rows.shape[-1] == 1 else rows[..., start:end]
            where.add_(part.sum_to_size(where.shape))
            at += end - start

    def bias(self, rectangle: Rectangle, like: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """What is added to a rectangle's scores, and whether the kernel applies the causal mask."""
        mask = None if self.mask is None else self.mask_part(self.mask, rectangle)
        if rectangle.kind != BANDED and (mask is None or rectangle.kind != CAUSAL):
            return None if mask is None else _added(mask, like), rectangle.kind == CAUSAL
        height, width = (end - start for start, end in (rectangle.rows, rectangle.columns))
        left, right = self.band if rectangle.kind == BANDED else (None, 0)
        row = torch.arange(height, device=like.device).unsqueeze(1) + rectangle.offset
        column = torch.arange(width, device=like.device)
        allowed = torch.ones(height, width, dtype=torch.bool, device=like.device)
        if left is not None:
            allowed = allowed & (column >= row - left)
        if right is not None:
            allowed = allowed & (column <= row + right)
        if mask is None or mask.dtype is torch.bool:
            return _added(allowed.view(1, 1, height, width) if mask is None else mask & allowed, like), False
        return _added(mask, like).masked_fill(~allowed, LOWEST), False


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, LOWEST)


class MergedAttention:
    """The result while tiles are added: `out` [B, h, s, e] and `lse` [B, h, s]."""

    def __init__(self, q: torch.Tensor, head: int) -> None:
        self.q, self.dtype = q, wide(q.dtype)
        self.out = torch.zeros(*q.shape[:-1], head, dtype=self.dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], LOWEST, dtype=self.dtype, device=q.device)

    def add(self, tile: AttentionTile, k: torch.Tensor, v: torch.Tensor) -> None:
        """Every rectangle of a tile."""
        for rectangle in tile.rectangles():
            q = _rows(self.q, rectangle.rows)
            bias, causal = tile.bias(rectangle, q)
            out, lse = attend(
                q, _rows(k, rectangle.columns), _rows(v, rectangle.columns), bias=bias, causal=causal, scale=tile.scale
            )
            self._merge(rectangle.rows, out.to(self.dtype), lse.to(self.dtype))

    def _merge(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        before, known = self.lse[..., rows[0] : rows[1]], _rows(self.out, rows)
        both = torch.logaddexp(before, lse)
        finite = both.masked_fill(both == LOWEST, 0.0)
        known.mul_(torch.exp(before - finite).unsqueeze(-1)).add_(out * torch.exp(lse - finite).unsqueeze(-1))
        before.copy_(both)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in the dtype of the queries, and a finite log-sum-exp."""
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == LOWEST, 0.0)


class AttentionGradients:
    """Gradients of q and of a learned `mask` that is added to the scores, while tiles are added; and of each tile's k and v."""

    def __init__(
        self, grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        self.grad, self.q, self.out, self.lse = grad, q, out, lse
        self.to_mask = None if mask is None else torch.zeros_like(mask)
        self.to_q = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, tile: AttentionTile, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to the gradient of q; returns those of k and v, in the wide dtype."""
        to_k, to_v = (torch.zeros_like(x, dtype=self.to_q.dtype) for x in (k, v))
        for rectangle in tile.rectangles():
            found = self._rectangle(tile, rectangle, k, v)
            for sums, where, part in zip(
                (self.to_q, to_k, to_v), (rectangle.rows, rectangle.columns, rectangle.columns), found, strict=True
            ):
                _rows(sums, where).add_(part)
        return to_k, to_v

    def _rectangle(self, tile: AttentionTile, rectangle: Rectangle, k: torch.Tensor, v: torch.Tensor) -> Grads:
        grad, q, out = (_rows(x, rectangle.rows) for x in (self.grad, self.q, self.out))
        lse = self.lse[..., rectangle.rows[0] : rectangle.rows[1]]
        bias, causal = tile.bias(rectangle, q)
        keys, values = _rows(k, rectangle.columns), _rows(v, rectangle.columns)
        if self.to_mask is None:
            return attend_backward(grad, q, keys, values, out, lse, bias=bias, causal=causal, scale=tile.scale)
        *found, to_scores = plain_backward(grad, q, keys, values, out, lse, bias=bias, causal=causal, scale=tile.scale)
        tile.add_mask_gradient(self.to_mask, rectangle, to_scores)
        return tuple(found)  # type: ignore[return-value]


def _rows(x: torch.Tensor, where: Range) -> torch.Tensor:
    return x[:, :, where[0] : where[1]]
