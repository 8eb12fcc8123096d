"""Attention of tiles, rectangle by rectangle: partial results are merged by their log-sum-exp (FlashAttention-2, arXiv
2307.08691, section 3.1.1), in float32 at least.

The kernel of a rectangle gives the log-sum-exp, and its backward is that of the whole rows. Queries are [B, h, s, d], keys
[B, g, t, d], values [B, g, t, e], where g divides h. The kernel is torch's own if it has one that returns the log-sum-exp, else
plain operations. A backward that is given `out` and `lse` of the whole rows, not of the rectangle, computes the rectangle's part
of the gradients (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .rectangles import BANDED, CAUSAL, Band, Range, Rectangle, Spans, rectangles

LOWEST = float("-inf")
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse [B, h, s]) of scores ``scale * q k^T + bias``; `causal`: a query sees the keys up to its own number. A row
    without a key has a log-sum-exp of minus infinity, and zeros."""
    kernel = _kernel(q, v, bias)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    elif kernel == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        return _plain(q, k, v, bias, causal, scale)
    if bias is not None:
        lse = lse.masked_fill((bias == LOWEST).all(-1), LOWEST)
    return out, lse


def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, bias: torch.Tensor | None, causal: bool, scale: float,
) -> Grads:  # fmt: skip
    """Gradients of q, k and v. `lse` of a row without a key is any finite number."""
    kernel = _kernel(q, v, bias)
    if kernel == "cpu":
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    if kernel == "flash":
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        sizes = (None, None, q.shape[2], k.shape[2])
        return back(grad.contiguous(), q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, state, unused, scale=scale)  # type: ignore[no-any-return]
    return plain_backward(grad, q, k, v, out, lse, bias=bias, causal=causal, scale=scale)[:3]


def _kernel(q: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Return the kernel that takes these operands: ``cpu``, ``flash`` or ``plain``."""
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and bias is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return "flash"
    return "plain"


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries by group [B, g, r, s, d], and their scores [B, g, r, s, t]; both wide."""
    dtype = wide(q.dtype)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    scores = torch.matmul(grouped * scale, k.to(dtype).unsqueeze(2).transpose(-1, -2))
    if bias is not None:
        shape = (*q.shape[:3], k.shape[2])
        scores = scores + bias.to(dtype).expand(shape).unflatten(1, scores.shape[1:3])
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, LOWEST)
    return grouped, scores


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _, scores = _scores(q, k, bias, causal, scale)
    lse = torch.logsumexp(scores, -1)
    finite = lse.masked_fill(lse == LOWEST, 0.0)
    weights = torch.exp(scores - finite.unsqueeze(-1))
    out = torch.matmul(weights, v.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    return out, lse.flatten(1, 2)


def plain_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, bias: torch.Tensor | None, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `attend_backward` by plain operations, and the gradient of what is added to the scores, [B, h, s, t]."""
    grouped, scores = _scores(q, k, bias, causal, scale)
    groups = scores.shape[1:3]
    weights = torch.exp(scores - lse.unflatten(1, groups).unsqueeze(-1))
    above = grad.to(weights.dtype).unflatten(1, groups)
    mean = (above * out.to(weights.dtype).unflatten(1, groups)).sum(-1, keepdim=True)
    to_scores = weights * (torch.matmul(above, v.to(weights.dtype).unsqueeze(2).transpose(-1, -2)) - mean)
    scaled = to_scores * scale
    to_q = torch.matmul(scaled, k.to(weights.dtype).unsqueeze(2)).flatten(1, 2)
    to_k = torch.matmul(scaled.transpose(-1, -2), grouped).sum(2)
    to_v = torch.matmul(weights.transpose(-1, -2), above).sum(2)
    return to_q, to_k, to_v, to_scores.flatten(1, 2)


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
        """Add a rectangle's gradient of the scores to a tensor shaped like the mask."""
        at = 0
        for start, end in self.key_ranges(rectangle):
            part = scores[..., at : at + end - start]
            rows = total if total.shape[-2] == 1 else total[:, :, rectangle.rows[0] : rectangle.rows[1]]
            where = rows if rows.shape[-1] == 1 else rows[..., start:end]
            where.add_(part.sum_to_size(where.shape))
            at += end - start

    def bias(self, rectangle: Rectangle, like: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """Return the summand of a rectangle's scores, and whether the kernel applies the causal mask."""
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


@dataclass(frozen=True, slots=True)
class MergedAttention:
    """The result of queries while tiles are added: `out` [B, h, s, e] and `lse` [B, h, s], both wide."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @staticmethod
    def empty(q: torch.Tensor, head: int) -> MergedAttention:
        """The result before any tile is added."""
        dtype = wide(q.dtype)
        out = torch.zeros(*q.shape[:-1], head, dtype=dtype, device=q.device)
        return MergedAttention(q, out, torch.full(q.shape[:-1], LOWEST, dtype=dtype, device=q.device))

    def part(self, example: int, rows: slice) -> MergedAttention:
        """The result of some queries of one example, in the same storage."""
        return MergedAttention(*(x[example : example + 1, :, rows] for x in (self.q, self.out, self.lse)))

    def add(self, tile: AttentionTile, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add every rectangle of a tile."""
        for rectangle in tile.rectangles():
            q = _rows(self.q, rectangle.rows)
            bias, causal = tile.bias(rectangle, q)
            out, lse = attend(
                q, _rows(k, rectangle.columns), _rows(v, rectangle.columns), bias=bias, causal=causal, scale=tile.scale
            )
            self._merge(rectangle.rows, out.to(self.out.dtype), lse.to(self.out.dtype))

    def _merge(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        before, sums = self.lse[..., rows[0] : rows[1]], _rows(self.out, rows)
        both = torch.logaddexp(before, lse)
        finite = both.masked_fill(both == LOWEST, 0.0)
        sums.mul_(torch.exp(before - finite).unsqueeze(-1)).add_(out * torch.exp(lse - finite).unsqueeze(-1))
        before.copy_(both)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in the dtype of the queries, and a finite log-sum-exp."""
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == LOWEST, 0.0)


@dataclass(frozen=True, slots=True)
class AttentionGradients:
    """Gradients of q and of a learned mask that is added to the scores, while tiles are added; and of each tile's k and v."""

    grad: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    to_q: torch.Tensor
    to_mask: torch.Tensor | None = None

    @staticmethod
    def zero(
        grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None = None
    ) -> AttentionGradients:
        """The gradients before any tile is added."""
        to_q, to_mask = torch.zeros_like(q, dtype=wide(q.dtype)), None if mask is None else torch.zeros_like(mask)
        return AttentionGradients(grad, q, out, lse, to_q, to_mask)

    def part(self, example: int, rows: slice) -> AttentionGradients:
        """The gradients of some queries of one example, in the same storage."""
        tensors = (self.grad, self.q, self.out, self.lse, self.to_q)
        return AttentionGradients(*(x[example : example + 1, :, rows] for x in tensors))

    def add(self, tile: AttentionTile, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the gradient of q; return those of k and v, in the wide dtype."""
        to_k, to_v = (torch.zeros_like(x, dtype=self.to_q.dtype) for x in (k, v))
        for rectangle in tile.rectangles():
            parts = self._rectangle(tile, rectangle, k, v)
            for sums, where, part in zip(
                (self.to_q, to_k, to_v), (rectangle.rows, rectangle.columns, rectangle.columns), parts, strict=True
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
        *parts, to_scores = plain_backward(grad, q, keys, values, out, lse, bias=bias, causal=causal, scale=tile.scale)
        tile.add_mask_gradient(self.to_mask, rectangle, to_scores)
        return tuple(parts)  # type: ignore[return-value]


def _rows(x: torch.Tensor, where: Range) -> torch.Tensor:
    return x[:, :, where[0] : where[1]]
