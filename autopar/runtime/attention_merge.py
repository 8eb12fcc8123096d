"""Attention of rows and columns that a tensor holds of a sequence, rectangle by rectangle: results are put together by their
log-sum-exp (FlashAttention-2, arXiv 2307.08691, section 3.1.1), in float32 at least."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention_kernels import LOWEST, Grads, attend, attend_backward, plain_backward, wide
from .attention_pieces import BANDED, CAUSAL, Band, Piece, Range, Spans, pieces


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values of `columns` for queries of `rows`. `mask`: true or false, or added to the scores, [B or 1, h or 1, s or 1,
    T or 1]; its rows are those of this block, its columns all T of the sequence, in order."""

    rows: Spans
    columns: Spans
    band: Band
    scale: float
    mask: torch.Tensor | None = None

    def pieces(self) -> tuple[Piece, ...]:
        """What to compute of it."""
        return pieces(self.rows, self.columns, self.band)

    def part(self, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        """What a tensor like the mask has for a piece."""
        x = x if x.shape[-2] == 1 else x[:, :, piece.rows[0] : piece.rows[1]]
        return x if x.shape[-1] == 1 else torch.cat([x[..., start:end] for start, end in self.positions(piece)], -1)

    def positions(self, piece: Piece) -> list[Range]:
        """The keys of a piece."""
        out, at = [], 0
        for start, length in self.columns:
            first, last = max(piece.columns[0], at), min(piece.columns[1], at + length)
            out += [(start + first - at, start + last - at)] * (first < last)
            at += length
        return out

    def add_to(self, total: torch.Tensor, piece: Piece, scores: torch.Tensor) -> None:
        """Adds what a piece makes of its scores to a tensor like the mask."""
        at = 0
        for start, end in self.positions(piece):
            part = scores[..., at : at + end - start]
            rows = total if total.shape[-2] == 1 else total[:, :, piece.rows[0] : piece.rows[1]]
            where = rows if rows.shape[-1] == 1 else rows[..., start:end]
            where.add_(part.sum_to_size(where.shape))
            at += end - start

    def bias(self, piece: Piece, like: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """What is added to a piece's scores, and whether the kernel is left to see to the diagonal."""
        mask = None if self.mask is None else self.part(self.mask, piece)
        if piece.kind != BANDED and (mask is None or piece.kind != CAUSAL):
            return None if mask is None else _added(mask, like), piece.kind == CAUSAL
        height, width = (end - start for start, end in (piece.rows, piece.columns))
        left, right = self.band if piece.kind == BANDED else (None, 0)
        row = torch.arange(height, device=like.device).unsqueeze(1) + piece.offset
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


class Merged:
    """The result while blocks come in: `out` [B, h, s, e] and `lse` [B, h, s]."""

    def __init__(self, q: torch.Tensor, head: int) -> None:
        self.q, self.dtype = q, wide(q.dtype)
        self.out = torch.zeros(*q.shape[:-1], head, dtype=self.dtype, device=q.device)
        self.lse = torch.full(q.shape[:-1], LOWEST, dtype=self.dtype, device=q.device)

    def add(self, block: Block, k: torch.Tensor, v: torch.Tensor) -> None:
        """Every piece of a block."""
        for piece in block.pieces():
            q = _rows(self.q, piece.rows)
            bias, causal = block.bias(piece, q)
            out, lse = attend(q, _rows(k, piece.columns), _rows(v, piece.columns), bias, causal, block.scale)
            self._merge(piece.rows, out.to(self.dtype), lse.to(self.dtype))

    def _merge(self, rows: Range, out: torch.Tensor, lse: torch.Tensor) -> None:
        before, known = self.lse[..., rows[0] : rows[1]], _rows(self.out, rows)
        both = torch.logaddexp(before, lse)
        finite = both.masked_fill(both == LOWEST, 0.0)
        known.mul_(torch.exp(before - finite).unsqueeze(-1)).add_(out * torch.exp(lse - finite).unsqueeze(-1))
        before.copy_(both)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in the dtype of the queries, and a finite log-sum-exp."""
        return self.out.to(self.q.dtype), self.lse.masked_fill(self.lse == LOWEST, 0.0)


class Gradients:
    """Of q while blocks come in, of a `mask` that is added and learned, and of each block's k and v."""

    def __init__(
        self, grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        self.grad, self.q, self.out, self.lse = grad, q, out, lse
        self.to_mask = None if mask is None else torch.zeros_like(mask)
        self.to_q = torch.zeros_like(q, dtype=wide(q.dtype))

    def add(self, block: Block, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to the gradient of q; those of k and v, wide."""
        to_k, to_v = (torch.zeros_like(x, dtype=self.to_q.dtype) for x in (k, v))
        for piece in block.pieces():
            found = self._piece(block, piece, k, v)
            for sums, where, part in zip((self.to_q, to_k, to_v), (piece.rows, piece.columns, piece.columns), found, strict=True):
                _rows(sums, where).add_(part)
        return to_k, to_v

    def _piece(self, block: Block, piece: Piece, k: torch.Tensor, v: torch.Tensor) -> Grads:
        grad, q, out = (_rows(x, piece.rows) for x in (self.grad, self.q, self.out))
        lse = self.lse[..., piece.rows[0] : piece.rows[1]]
        bias, causal = block.bias(piece, q)
        keys, values = _rows(k, piece.columns), _rows(v, piece.columns)
        if self.to_mask is None:
            return attend_backward(grad, q, keys, values, out, lse, bias, causal, block.scale)
        *found, to_scores = plain_backward(grad, q, keys, values, out, lse, bias, causal, block.scale)
        block.add_to(self.to_mask, piece, to_scores)
        return tuple(found)  # type: ignore[return-value]


def _rows(x: torch.Tensor, where: Range) -> torch.Tensor:
    return x[:, :, where[0] : where[1]]
