"""Ring attention: the sequence is sharded over an axis, keys and values travel, queries stay (Liu et al., arXiv 2310.01889).

Rank r holds the r-th part of the queries, of the keys and of the values. In step i it computes on the keys and values of rank r -
i, while those of rank r - i - 1 are in flight; in the backward it sends the gradients of a block back to its owner while it
computes on the next. Keys that no query of a rank sees are not sent to it: a window costs as many steps as it reaches parts.

Causal attention gives the first ranks little work and the last ones much. So rank r and its mirror n - 1 - r first exchange the
second halves of their parts, and those of the result at the end (*zigzag*): of 2 n half parts, rank r computes 2 r and 2 n - 1 -
2 r, which makes two full products of half parts with the keys of every other rank (pairs of r and 2 n - 1 - r are as even, but
would move nearly everything). Outside of these functions parts are contiguous. The order stays as it is where a window is
narrower than half of the sequence, a mask has rows of its own, or parts are odd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...compat.autograd import apply
from ...compat.collectives import all_to_all_rows, wait_tensor
from ...device.axis import AxisHandle
from .merge import AttentionGradients, AttentionTile, MergedAttention
from .rectangles import Band, Spans, any_visible
from .sharded import Window, attention_rows, band_of, four_dims, scale_of

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ring(ABC):
    """The ring of an axis: which ranks send keys and values to which, alike on all of them."""

    size: int
    coordinate: int
    group: str

    @abstractmethod
    def needed(self, rank: int, owner: int) -> Spans:
        """Return the keys of `owner` that queries of another `rank` see, as rows ``((first, length), ...)`` of its part."""

    def sees(self, rank: int, step: int) -> bool:
        """Return whether queries of `rank` see keys of the rank that is `step` before it."""
        return bool(self.needed(rank, (rank - step) % self.size))

    @property
    @abstractmethod
    def part_rows(self) -> int:
        """The keys that a rank has."""

    def steps(self) -> list[int]:
        """The steps in which any rank computes on keys of another: the same on all ranks."""
        return [step for step in range(1, self.size) if any(self.sees(rank, step) for rank in range(self.size))]

    def rounds(self) -> list[tuple[int, ...]]:
        """The steps whose keys arrive together, in one collective: no more of them than a rank has itself."""
        out: list[tuple[int, ...]] = []
        arrived = [0] * self.size
        for step in self.steps():
            more = [_count(self.needed(rank, (rank - step) % self.size)) for rank in range(self.size)]
            together = [before + rows for before, rows in zip(arrived, more, strict=True)]
            if out and max(together) <= self.part_rows:
                out[-1] = (*out[-1], step)
            else:
                out.append((step,))
                together = more
            arrived = together
        return out

    def _needing(self, steps: Sequence[int]) -> list[tuple[int, Spans]]:
        """The ranks that see keys of this one in these steps, in order, and which."""
        ranks = sorted((self.coordinate + step) % self.size for step in steps)
        return [(rank, self.needed(rank, self.coordinate)) for rank in ranks]

    def _owning(self, steps: Sequence[int]) -> list[tuple[int, Spans]]:
        """The ranks whose keys this one sees in these steps, in order, and which."""
        ranks = sorted((self.coordinate - step) % self.size for step in steps)
        return [(rank, self.needed(self.coordinate, rank)) for rank in ranks]

    def _exchange(
        self, flat: torch.Tensor, width: int, sent: list[tuple[int, Spans]], received: list[tuple[int, Spans]]
    ) -> torch.Tensor:
        """Send rows of `width` elements to ranks, in order, and return those that are received."""
        send, receive = ([0] * self.size for _ in range(2))
        for splits, pairs in ((send, sent), (receive, received)):
            for rank, spans in pairs:
                splits[rank] = width * _count(spans)
        return all_to_all_rows(flat, receive, send, self.group)

    def messages(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
        """Yield (owner, keys, values) of this rank, and then of the ranks of each round while the next one's are in flight: what
        its queries see of them, no rows where they see none."""
        rounds, width = self.rounds(), _width(k, v)
        parts: dict[Spans, torch.Tensor] = {}

        def send(steps: Sequence[int]) -> torch.Tensor:
            ranks, flats = self._needing(steps), []
            for _, spans in ranks:
                if spans not in parts:
                    parts[spans] = _flat(_rows_of(k, spans), _rows_of(v, spans), k.dtype)
                flats.append(parts[spans])
            return self._exchange(flats[0] if len(flats) == 1 else torch.cat(flats), width, ranks, self._owning(steps))

        receiving = [send(steps) for steps in rounds[:1]]
        yield [(self.coordinate, k, v)]
        for index, steps in enumerate(rounds):
            receiving += [send(after) for after in rounds[index + 1 : index + 2]]
            owners = self._owning(steps)
            blocks = wait_tensor(receiving.pop(0)).split([width * _count(spans) for _, spans in owners])
            yield [(owner, *_pair(block, k, v)) for (owner, _), block in zip(owners, blocks, strict=True)]

    def attend(self, k: torch.Tensor, v: torch.Tensor, add: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        """Call `add` with the rank, the keys and the values of every part that this rank's queries see."""
        for message in self.messages(k, v):
            for owner, keys, values in message:
                if keys.shape[2]:
                    add(owner, keys, values)

    def gradients(self, k: torch.Tensor, v: torch.Tensor, add: Callable[[int, torch.Tensor, torch.Tensor], Pair]) -> Pair:
        """Return the gradients of this rank's keys and values, in the wide dtype: `add` makes those of each part that its queries
        see, which go back to their owner while the next are computed."""
        rounds, width = self.rounds(), _width(k, v)
        own: list[torch.Tensor] = []
        returning: list[tuple[Sequence[int], torch.Tensor]] = []
        for index, message in enumerate(self.messages(k, v)):
            if index == 0:
                own += add(*message[0])
                continue
            steps = rounds[index - 1]
            # also no rows are rows of gradients: what does not depend on them a compiled forward would send, on some ranks
            pairs = [add(*part) if part[1].shape[2] else (own[0][:, :, :0], own[1][:, :, :0]) for part in message]
            flat = torch.cat([_flat(*pair, k.dtype) for pair in pairs])
            returning.append((steps, self._exchange(flat, width, self._owning(steps), self._needing(steps))))
            if len(returning) > 1:
                self._add(*returning.pop(0), *own)
        for each in returning:
            self._add(*each, *own)
        to_k, to_v = own
        return to_k, to_v

    def _add(self, steps: Sequence[int], received: torch.Tensor, to_k: torch.Tensor, to_v: torch.Tensor) -> None:
        """Add the gradients of this rank's keys and values that the ranks of a round have computed."""
        ranks, width = self._needing(steps), _width(to_k, to_v)
        blocks = wait_tensor(received).split([width * _count(spans) for _, spans in ranks])
        for (_, spans), block in zip(ranks, blocks, strict=True):
            for total, part in zip((to_k, to_v), _pair(block, to_k, to_v), strict=True):
                at = 0
                # also where nothing comes: what a compiled backward does not use, it does not send either
                for first, length in spans or ((0, 0),):
                    total.narrow(2, first, length).add_(part.narrow(2, at, length))
                    at += length


@dataclass(frozen=True, slots=True)
class BandRing(Ring):
    """A ring of one sequence: parts of `queries` and `keys` positions, the band, and whether it is zigzag."""

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

    @property
    def part_rows(self) -> int:
        return self.keys

    def needed(self, rank: int, owner: int) -> Spans:
        return ((0, self.keys),) if any_visible(self.rows(rank), self.columns(owner), self.band) else ()

    def exchange_halves(self, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Exchange the second half of each sequence with the mirror rank; its own inverse. Without zigzag nothing is done."""
        if not self.zigzag:
            return tuple(xs)
        halves = [x.chunk(2, 2) for x in xs]
        flat = torch.cat([half.reshape(-1) for _, half in halves])
        splits = [flat.numel() * (rank == self.size - 1 - self.coordinate) for rank in range(self.size)]
        parts = wait_tensor(all_to_all_rows(flat, splits, splits, self.group)).split([half.numel() for _, half in halves])
        return tuple(torch.cat((first, part.view(second.shape)), 2) for (first, second), part in zip(halves, parts, strict=True))

    def tile(self, rank: int, mask: torch.Tensor | None, scale: float) -> AttentionTile:
        """This rank's queries on the keys of `rank`."""
        return AttentionTile(self.rows(self.coordinate), self.columns(rank), self.band, scale, mask)


def ring_of(
    size: int, here: int, group: str, queries: int, keys: int, is_causal: bool, window: Window | None, mask_rows: bool
) -> BandRing:
    """The ring of parts of so many queries and keys; `mask_rows`: the mask has rows of its own, which stay where they are."""
    left, right = band = band_of(is_causal, window)
    reaches = left is None or 2 * left >= queries * size
    zigzag = right == 0 and reaches and queries == keys and not (queries % 2 or mask_rows)
    return BandRing(size=size, coordinate=here, group=group, queries=queries, keys=keys, band=band, zigzag=zigzag)


def _count(spans: Spans) -> int:
    return sum(length for _, length in spans)


def _rows_of(x: torch.Tensor, spans: Spans) -> torch.Tensor:
    return x if spans == ((0, x.shape[2]),) else torch.cat([x[:, :, :0], *(x.narrow(2, *span) for span in spans)], 2)


def _width(k: torch.Tensor, v: torch.Tensor) -> int:
    """The elements of a row of keys and values."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _pair(flat: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """Return the rows of keys and values that `flat` has."""
    rows = flat.numel() // _width(k, v)
    shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (k, v)]
    to_k, to_v = flat.split([prod(shape) for shape in shapes])
    return to_k.view(shapes[0]), to_v.view(shapes[1])


def _flat(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1))).to(dtype)


class _Ring(torch.autograd.Function):
    """Saves q, k, v, the mask and the result in contiguous parts, and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, ring: BandRing, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.ring, ctx.scale = ring, scale
        queries, keys, values = ring.exchange_halves((q, k, v))
        merged = MergedAttention.empty(queries, v.shape[-1])
        ring.attend(keys, values, lambda rank, k, v: merged.add(ring.tile(rank, mask, scale), k, v))
        result, lse = merged.finish()
        (out,) = ring.exchange_halves((result,))
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ring, scale = ctx.ring, ctx.scale
        q, k, v, mask, out, lse = ctx.saved_tensors
        queries, keys, values, result, above = ring.exchange_halves((q, k, v, out, grad))
        gradients = AttentionGradients.zero(above, queries, result, lse, mask if ctx.needs_input_grad[-1] else None)
        to_k, to_v = ring.gradients(keys, values, lambda rank, k, v: gradients.add(ring.tile(rank, mask, scale), k, v))
        results = ring.exchange_halves((gradients.to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)))
        return None, None, *results, gradients.to_mask


def attention_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle,
) -> torch.Tensor:  # fmt: skip
    """Queries [B, h, s/n, d], keys [B, g, t/n, d] and values sharded on `axis`, as are the rows of the mask; it has all
    columns."""
    if axis.size == 1:
        return attention_rows(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, window=window, axis=axis)
    assert not dropout_p
    mask = four_dims(attn_mask)
    rows = mask is not None and mask.shape[-2] != 1
    ring = ring_of(axis.size, axis.coordinate, axis.group_name, q.shape[2], k.shape[2], is_causal, window, rows)
    return apply(_Ring, ring, scale_of(q, scale), q, k, v, mask)  # type: ignore[no-any-return]
