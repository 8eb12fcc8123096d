"""Attention within documents: a query sees the keys of its own document, up to its own position.

Queries [B, h, s, d], keys [B, g, t, d], values [B, g, t, e], where g divides h; documents and positions are numbers [B or 1, s]
and [B or 1, t]. A query sees a key where their documents are equal and the key's position is not above its own, nor more than a
window below it; without positions all keys of its document. A row of documents falls apart into runs, each of which is attended
by itself, so no tensor has the size of the scores [s, t]. Queries may be any shard of the sequence, since all that they need is
given for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...compat.autograd import apply, has_data
from .merge import AttentionGradients, AttentionTile, MergedAttention
from .rectangles import Band
from .sharded import Window, band_of, scale_of

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """Neighbouring queries of one document, and its keys. `rows` are queries of example `example`, `columns` its keys (a slice
    where they are neighbours). `tile`: how they see each other."""

    example: int
    rows: slice
    columns: slice | torch.Tensor
    tile: AttentionTile

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """The part of keys or values of this document."""
        return x[self.example : self.example + 1, :, self.columns]

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """The part of queries, or of what has their shape."""
        return x[self.example : self.example + 1, :, self.rows]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor, key_documents: Tensor, query_positions: Tensor | None,
    key_positions: Tensor | None, *, scale: float, window_left: int | None, window_right: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the logarithm of the sums of its softmax."""
    out, lse = _results(q, v)
    ids = (query_documents, key_documents, query_positions, key_positions)
    for run in document_runs(q.shape[0], scale, (window_left, window_right), *ids):
        merged = MergedAttention(run.queries(q), v.shape[-1])
        merged.add(run.tile, run.keys(k), run.keys(v))
        here, sums = merged.finish()
        run.queries(out).copy_(here)
        run.queries(lse).copy_(sums)
    return out, lse


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return out, torch.zeros(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def _gradients(
    results: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor, key_documents: Tensor,
    query_positions: Tensor | None, key_positions: Tensor | None, *, scale: float, window_left: int | None,
    window_right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v. `results`: the gradient of the result, and what `_attend` returned."""
    grad, out, lse = results
    to_q, to_k, to_v = torch.zeros_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    ids = (query_documents, key_documents, query_positions, key_positions)
    for run in document_runs(q.shape[0], scale, (window_left, window_right), *ids):
        gradients = AttentionGradients(*(run.queries(x) for x in (grad, q, out, lse)))
        for sums, part in zip((to_k, to_v), gradients.add(run.tile, run.keys(k), run.keys(v)), strict=True):
            if isinstance(run.columns, slice):
                run.keys(sums).add_(part)
            else:
                sums[run.example].index_add_(1, run.columns, part[0])
        run.queries(to_q).copy_(gradients.to_q)
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)


# The lengths of documents are data: torch.compile calls both as they are.
_traced_attend = torch.library.custom_op("autopar::attend_documents", _attend, mutates_args=())
_traced_gradients = torch.library.custom_op("autopar::documents_gradients", _gradients, mutates_args=())


@_traced_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _results(q, v)


@_traced_gradients.register_fake
def _(
    results: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, band: Band, q: Tensor, k: Tensor, v: Tensor, *ids: Any) -> Tensor:
        attend = _traced_attend if torch.compiler.is_compiling() else _attend
        out, lse = attend(q, k, v, *ids, scale=scale, window_left=band[0], window_right=band[1])
        ctx.scale, ctx.band = scale, band
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *ids = ctx.saved_tensors
        pull, (left, right) = _traced_gradients if torch.compiler.is_compiling() else _gradients, ctx.band
        gradients = pull([grad, out, lse], q, k, v, *ids, scale=ctx.scale, window_left=left, window_right=right)
        return None, None, *gradients, *(None for _ in ids)


def attention_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, query_documents: torch.Tensor, key_documents: torch.Tensor,
    query_positions: torch.Tensor | None = None, key_positions: torch.Tensor | None = None, *,
    scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention within documents [B, h, s, e]. Exact for any numbers; quick where documents are neighbours and positions
    count up within them. A query that sees no key gets zeros. `window` as in `sharded`, of positions."""
    # torch.compile takes no tensor twice as an argument of an autograd function
    ids = (query_documents, _viewed(key_documents), query_positions, _viewed(key_positions))
    return apply(_Documents, scale_of(q, scale), band_of(True, window), q, k, v, *ids)  # type: ignore[no-any-return]


def _viewed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view_as(x)


def document_runs(
    examples: int, scale: float, band: Band, query_documents: torch.Tensor, key_documents: torch.Tensor,
    query_positions: torch.Tensor | None, key_positions: torch.Tensor | None,
) -> Iterator[DocumentRun]:  # fmt: skip
    """Yield what attends to what within the band of positions, row by row of the batch. A tensor without data counts as one
    document."""
    device = query_documents.device
    documents = [_numbers(x, counts=False) for x in (query_documents, key_documents)]
    positions = [None if x is None else _numbers(x, counts=True) for x in (query_positions, key_positions)]
    for example in range(examples):
        queries, keys = (rows[example % len(rows)] for rows in documents)
        at, seen = (None if rows is None else rows[example % len(rows)] for rows in positions)
        columns = _places(keys)
        for document, run in groupby(enumerate(queries), key=lambda each: each[1]):
            places = [place for place, _ in run]
            rows, here = slice(places[0], places[-1] + 1), columns.get(document)
            if here is not None:
                order = None if at is None or seen is None else (at[rows], [seen[place] for place in here])
                tile = _tile(len(places), len(here), order, band, scale, device)
                neighbours = here[-1] - here[0] + 1 == len(here)
                where = slice(here[0], here[-1] + 1) if neighbours else torch.tensor(here, device=device)
                yield DocumentRun(example, rows, where, tile)


def _numbers(ids: torch.Tensor, counts: bool) -> list[Numbers]:
    """Return the numbers of each row; without data one document, whose positions count up."""
    if has_data(ids):
        return ids.tolist()
    return [list(range(ids.shape[1])) if counts else [0] * ids.shape[1]]


def _places(numbers: Numbers) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        out.setdefault(number, []).append(place)
    return out


def _tile(
    height: int, width: int, order: tuple[Numbers, Numbers] | None, band: Band, scale: float, device: torch.device
) -> AttentionTile:
    """Return the tile of a run. `order`: the positions of its queries and keys; where they count up the tile has a band, else a
    mask of its own size."""
    if order is None:
        return AttentionTile(((0, height),), ((0, width),), (None, None), scale)
    rows, columns = order
    if _count_up(rows) and _count_up(columns):
        return AttentionTile(((rows[0], height),), ((columns[0], width),), band, scale)
    distances = torch.tensor(rows, device=device).unsqueeze(1) - torch.tensor(columns, device=device)
    allowed = (distances >= 0) & (distances <= (distances.max() if band[0] is None else band[0]))
    return AttentionTile(((0, height),), ((0, width),), (None, None), scale, allowed.view(1, 1, height, width))


def _count_up(numbers: Numbers) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
