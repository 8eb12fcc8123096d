"""Attention of a sequence that is cut over an axis: keys and values travel, queries stay (Liu et al., Ring Attention, arXiv
2310.01889).

Rank r holds the r-th part of the queries, of the keys and of the values. In step i it computes on the keys and values of rank
r - i, while those of rank r - i - 1 are on their way; in the backward it sends the gradients of a block back to its owner, while
it computes on the next. What no query of a rank sees is not sent to it: a window costs as many steps as it reaches parts.

Causal attention gives the first ranks little to do and the last ones much. So rank r and its mirror n - 1 - r exchange the second
halves of their parts before, and the result's after (*zigzag*): of 2 n chunks, rank r works on 2 r and 2 n - 1 - 2 r, which makes
two full products of chunks with the keys of every other rank (pairs of r and 2 n - 1 - r are as even, but nearly everything would
move). Outside of these functions parts are contiguous. Where a window is narrower than half of the sequence, a mask has rows of
its own, or parts are odd, the order stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .apply import apply
from .attention import Window, attention_rows, band_of, four, scale_of
from .attention_merge import Block, Gradients, Merged
from .attention_pieces import Band, Spans, meets
from .axis import AxisHandle
from .compat import all_to_all_rows, wait


@dataclass(frozen=True, slots=True)
class Ring:
    """What every rank of the axis knows: parts of `queries` and `keys` positions, the band, and whether chunks are mirrored."""

    size: int
    here: int
    group: str
    queries: int
    keys: int
    band: Band
    zigzag: bool

    def rows(self, rank: int) -> Spans:
        """The positions of a rank's queries."""
        return self._spans(rank, self.queries)

    def columns(self, rank: int) -> Spans:
        """The positions of a rank's keys."""
        return self._spans(rank, self.keys)

    def _spans(self, rank: int, length: int) -> Spans:
        if not self.zigzag:
            return ((rank * length, length),)
        half = length // 2
        return (2 * rank * half, half), ((2 * self.size - 1 - 2 * rank) * half, half)

    def sees(self, rank: int, step: int) -> bool:
        """Whether queries of `rank` see keys of the rank `step` before it."""
        return meets(self.rows(rank), self.columns((rank - step) % self.size), self.band)

    def steps(self) -> list[int]:
        """Those in which any rank has something to do beside its own keys: the same on all ranks."""
        return [step for step in range(1, self.size) if any(self.sees(rank, step) for rank in range(self.size))]

    def start(self, step: int, flat: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Sends `flat` to the rank `step` behind if it needs it, or `back` to where the block came from; what arrives here is of
        the same size, or empty."""
        behind, before = (self.here + step) % self.size, (self.here - step) % self.size
        there, mine = self.sees(behind, step), self.sees(self.here, step)
        sent, received = {behind: there}, {before: mine}
        if back:
            sent, received = received, sent
        send, receive = ([flat.numel() * pair.get(rank, False) for rank in range(self.size)] for pair in (sent, received))
        return all_to_all_rows(flat[: sum(send)], receive, send, self.group)

    def mirrored(self, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The second half of each sequence changed for the mirror's; its own inverse. Without zigzag nothing is done."""
        if not self.zigzag:
            return tuple(xs)
        halves = [x.chunk(2, 2) for x in xs]
        flat = torch.cat([half.reshape(-1) for _, half in halves])
        splits = [flat.numel() * (rank == self.size - 1 - self.here) for rank in range(self.size)]
        parts = wait(all_to_all_rows(flat, splits, splits, self.group)).split([half.numel() for _, half in halves])
        return tuple(torch.cat((first, part.view(second.shape)), 2) for (first, second), part in zip(halves, parts, strict=True))

    def block(self, rank: int, mask: torch.Tensor | None, scale: float) -> Block:
        """This rank's queries on the keys of `rank`."""
        return Block(self.rows(self.here), self.columns(rank), self.band, scale, mask)


def ring_of(
    size: int, here: int, group: str, queries: int, keys: int, is_causal: bool, window: Window | None, mask_rows: bool
) -> Ring:
    """Of parts of so many queries and keys; `mask_rows`: a mask has rows of its own, which stay where they are."""
    left, right = band = band_of(is_causal, window)
    reaches = left is None or 2 * left >= queries * size
    zigzag = right == 0 and reaches and queries == keys and not (queries % 2 or mask_rows)
    return Ring(size, here, group, queries, keys, band, zigzag)


def _pair(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    to_k, to_v = flat.split([k.numel(), v.numel()])
    return to_k.view(k.shape), to_v.view(v.shape)


def _flat(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1))).to(dtype)


class _Ring(torch.autograd.Function):
    """Keeps q, k, v, the mask and the result as they are outside, and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, ring: Ring, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.ring, ctx.scale = ring, scale
        mine, keys, values = ring.mirrored((q, k, v))
        merged, flat = Merged(mine, v.shape[-1]), _flat(keys, values, k.dtype)
        steps = ring.steps()
        coming = [ring.start(step, flat) for step in steps[:1]]
        merged.add(ring.block(ring.here, mask, scale), keys, values)
        for index, step in enumerate(steps):
            coming += [ring.start(after, flat) for after in steps[index + 1 : index + 2]]
            arrived = wait(coming.pop(0))
            if ring.sees(ring.here, step):
                merged.add(ring.block((ring.here - step) % ring.size, mask, scale), *_pair(arrived, keys, values))
        found, lse = merged.finish()
        (out,) = ring.mirrored((found,))
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring, scale = ctx.ring, ctx.scale
        q, k, v, mask, out, lse = ctx.saved_tensors
        mine, keys, values, found, above = ring.mirrored((q, k, v, out, grad))
        gradients = Gradients(above, mine, found, lse, mask if ctx.needs_input_grad[-1] else None)
        flat = _flat(keys, values, k.dtype)
        steps = ring.steps()
        coming = [ring.start(step, flat) for step in steps[:1]]
        going: list[torch.Tensor] = []
        to_k, to_v = gradients.add(ring.block(ring.here, mask, scale), keys, values)
        for index, step in enumerate(steps):
            coming += [ring.start(after, flat) for after in steps[index + 1 : index + 2]]
            arrived, sent = wait(coming.pop(0)), flat
            if ring.sees(ring.here, step):
                block = ring.block((ring.here - step) % ring.size, mask, scale)
                sent = _flat(*gradients.add(block, *_pair(arrived, keys, values)), k.dtype)
            going.append(ring.start(step, sent, back=True))
            if len(going) > 1:
                _add(going.pop(0), to_k, to_v)
        for each in going:
            _add(each, to_k, to_v)
        results = ring.mirrored((gradients.to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)))
        return None, None, *results, gradients.to_mask


def _add(arriving: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor) -> None:
    """Gradients of this rank's keys and values that another rank has computed."""
    flat = wait(arriving)
    if flat.numel():
        for total, part in zip((to_k, to_v), _pair(flat, to_k, to_v), strict=True):
            total.add_(part)


def attention_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Queries [B, h, s/n, d], keys [B, g, t/n, d] and values cut on `axis`, as are the rows of the mask; it has all columns."""
    if axis.size == 1:
        return attention_rows(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, window=window, axis=axis)
    assert not dropout_p
    mask = four(attn_mask)
    rows = mask is not None and mask.shape[-2] != 1
    ring = ring_of(axis.size, axis.coordinate, axis.group_name, q.shape[2], k.shape[2], is_causal, window, rows)
    return apply(_Ring, ring, scale_of(q, scale), q, k, v, mask)  # type: ignore[no-any-return]
