"""Attention within documents: a query sees the keys of its own document, up to its own position.

Queries [B, h, s, d], keys [B, g, t, d], values [B, g, t, e], where g divides h; documents and positions are numbers [B or 1, s]
and [B or 1, t]. A query sees a key where their documents are equal and the key's position is not above its own, nor more than a
window below it; without positions all keys of its document. A row of documents falls apart into runs, each of which is attended
by itself, so no tensor has the size of the scores [s, t]. Queries may be any shard of the sequence, since all that they need is
given for each of them; where the keys are a shard too, those of other ranks pass by (`ring`), but for the ranks without a common
document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...compat.autograd import apply, has_data
from ...compat.collectives import all_gather, wait_tensor
from ...device.axis import AxisHandle
from ...errors import LengthsError
from .document_ring import DocumentRing
from .document_runs import PackedRuns
from .merge import AttentionGradients, MergedAttention, wide
from .ring import Pair
from .sharded import Window, band_of, scale_of


def _ring_of(
    ids: Sequence[Tensor | None], examples: int, size: int, coordinate: int, group: str, scale: float,
    band: tuple[int | None, int | None],
) -> DocumentRing:  # fmt: skip
    """Return the ring of an axis, of whose ranks `ids` has documents and positions: [size * rows, length], or this rank's."""
    query_documents, key_documents, query_positions, key_positions = ids
    assert query_documents is not None and key_documents is not None
    queries = PackedRuns.of(query_documents, query_positions, size, examples)
    keys = PackedRuns.of(key_documents, key_positions, size, examples)
    return DocumentRing.of(size, coordinate, group, scale, band, queries, keys)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, ids: Sequence[Tensor | None], *, scale: float, window_left: int | None,
    window_right: int | None, size: int, coordinate: int, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the logarithm of the sums of its softmax."""
    ring, examples = _ring_of(ids, q.shape[0], size, coordinate, group, scale, (window_left, window_right)), q.shape[0]
    q, k, v = (_end_to_end(x, size) for x in (q, k, v))
    (q,) = ring.exchange_queries([q])
    merged = MergedAttention.empty(q, v.shape[-1])

    def add(rank: int, keys: Tensor, values: Tensor) -> None:
        for tile in ring.tiles(rank, q.device):
            at = tile.places(keys.shape[2])
            merged.part(*tile.rows(q.shape[2])).add(tile.tile, keys[at], values[at])

    ring.attend(k, v, add)
    out, lse = merged.finish()
    out, sums = ring.exchange_queries([out, _as_columns(lse, out)], back=True)
    return _by_example(out, examples).contiguous(), _as_numbers(_by_example(sums, examples), lse)


def _gradients(
    results: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, ids: Sequence[Tensor | None], *, scale: float,
    window_left: int | None, window_right: int | None, size: int, coordinate: int, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v. `results`: the gradient of the result, and what `_attend` returned."""
    ring, examples = _ring_of(ids, q.shape[0], size, coordinate, group, scale, (window_left, window_right)), q.shape[0]
    like, (grad, out, lse) = (q, k, v), results
    q, k, v, grad, out, sums = (_end_to_end(x, size) for x in (q, k, v, grad, out, _as_columns(lse, out)))
    grad, q, out, sums = ring.exchange_queries([grad, q, out, sums])
    gradients = AttentionGradients.zero(grad, q, out, _as_numbers(sums, lse))

    def add(rank: int, keys: Tensor, values: Tensor) -> Pair:
        to_k, to_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values))
        for tile in ring.tiles(rank, q.device):
            at = tile.places(keys.shape[2])
            parts = gradients.part(*tile.rows(gradients.q.shape[2])).add(tile.tile, keys[at], values[at])
            for sums, part in zip((to_k, to_v), parts, strict=True):
                sums[at] += part
        return to_k, to_v

    to_k, to_v = ring.gradients(k, v, add)
    (to_q,) = ring.exchange_queries([gradients.to_q.to(q.dtype)], back=True)
    to_q, to_k, to_v = (_laid_out(_by_example(x, examples), like) for x, like in zip((to_q, to_k, to_v), like, strict=True))
    return to_q, to_k, to_v


def _as_columns(sums: Tensor, like: Tensor) -> Tensor:
    """Return a number of each query as columns of the dtype of `like`, bit by bit, so that both are sent together."""
    return sums.contiguous().unsqueeze(-1).view(like.dtype)


def _as_numbers(columns: Tensor, like: Tensor) -> Tensor:
    return columns.contiguous().view(like.dtype).squeeze(-1)


def _end_to_end(x: Tensor, size: int) -> Tensor:
    """Return the examples of a ring as one: a rank may compute more queries of one than of another."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0) if size > 1 < len(x) else x


def _by_example(x: Tensor, examples: int) -> Tensor:
    return x[0].unflatten(1, (examples, -1)).transpose(0, 1) if len(x) < examples else x


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` with the dtype and the strides of `like`, as compiled code expects them."""
    return x.to(like.dtype) if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


# The lengths of documents are data: torch.compile calls both as they are.
_traced_attend = torch.library.custom_op("autopar::attend_documents", _attend, mutates_args=())
_traced_gradients = torch.library.custom_op("autopar::documents_gradients", _gradients, mutates_args=())


@_traced_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


@_traced_gradients.register_fake
def _(results: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class _Documents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *ids: Any) -> Tensor:
        attend = _traced_attend if torch.compiler.is_compiling() else _attend
        out, lse = attend(q, k, v, ids, **options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, *ids)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse, *ids = ctx.saved_tensors
        pull = _traced_gradients if torch.compiler.is_compiling() else _gradients
        return None, *pull([grad, out, lse], q, k, v, ids, **ctx.options), *(None for _ in ids)


def attention_documents(
    q: Tensor, k: Tensor, v: Tensor, query_documents: Tensor, key_documents: Tensor, query_positions: Tensor | None = None,
    key_positions: Tensor | None = None, *, scale: float | None = None, enable_gqa: bool = False, window: Window | None = None,
    axis: AxisHandle | None = None,
) -> Tensor:  # fmt: skip
    """Return attention within documents [B, h, s, e]. Exact for any numbers; quick where documents are neighbours and positions
    count up within them. A query that sees no key gets zeros. `window` as in `sharded`, of positions. On an `axis`, queries, keys
    and values [B, h, s/n, d], and their documents and positions, are shards of the sequence."""
    left, right = band_of(True, window)
    options: dict[str, Any] = {"scale": scale_of(q, scale), "window_left": left, "window_right": right}
    ids: list[Tensor | None] = [query_documents, key_documents, query_positions, key_positions]
    if axis is None or axis.size == 1:
        options |= {"size": 1, "coordinate": 0, "group": ""}
    else:
        options |= {"size": axis.size, "coordinate": axis.coordinate, "group": axis.group_name}
        ids = _of_all_ranks(ids, axis)
    # torch.compile takes no tensor twice as an argument of an autograd function
    ids[1::2] = [_viewed(x) for x in ids[1::2]]
    return apply(_Documents, options, q, k, v, *ids)  # type: ignore[no-any-return]


def _of_all_ranks(ids: Sequence[Tensor | None], axis: AxisHandle) -> list[Tensor | None]:
    """Return the numbers [rows, length] of all ranks, [n * rows, length], by one all-gather."""
    own = {id(x): x for x in ids if x is not None}  # queries and keys often have the same
    flat = torch.cat([x.reshape(-1).long() for x in own.values()])
    parts = (
        wait_tensor(all_gather(flat, axis.size, axis.group_name)).view(axis.size, -1).split([x.numel() for x in own.values()], 1)
    )
    gathered = {key: part.reshape(-1, own[key].shape[1]) for key, part in zip(own, parts, strict=True)}
    return [None if x is None else gathered[id(x)] for x in ids]


def _viewed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view_as(x)


def document_numbers(ends: Tensor, others: Tensor, tokens: int, rows: int) -> Tensor:
    """Return the number of each token's document ``[tokens]``. Documents stand one after the other; ``ends [N + 1]`` are their
    first tokens and the end of the last, as in ``cu_seqlens`` of kernels for them; some may be empty. LengthsError where there
    are no such documents, where `others` says other ones, and where one reaches from one of `rows` equal rows into the next."""
    number = _traced_numbers if torch.compiler.is_compiling() else _numbers
    return number(ends, others, tokens, rows)


def _numbers(ends: Tensor, others: Tensor, tokens: int, rows: int) -> Tensor:
    if has_data(ends):
        _check_ends(ends.tolist(), others.tolist(), tokens, rows)
    return torch.bucketize(torch.arange(tokens, device=ends.device), ends[1:].long(), right=True)


_traced_numbers = torch.library.custom_op("autopar::document_numbers", _numbers, mutates_args=())


@_traced_numbers.register_fake
def _(ends: Tensor, others: Tensor, tokens: int, rows: int) -> Tensor:
    return ends.new_empty(tokens, dtype=torch.int64)


def _check_ends(ends: list[int], others: list[int], tokens: int, rows: int) -> None:
    if ends[:1] != [0] or ends[-1] != tokens or ends != sorted(ends):
        shown = f"{', '.join(map(str, ends[:6]))}{', ...' if len(ends) > 6 else ''}, which end at {ends[-1]}" if ends else "empty"
        raise LengthsError(
            f"cu_seqlens are {shown}, of {tokens} tokens: they must begin at 0, not decrease, and end at the number of tokens "
            "(padding is one more document)"
        )
    if others != ends:
        raise LengthsError(
            "cu_seq_q and cu_seq_k say different documents: pass the same, or attend with a mask (document[q] == document[k])"
        )
    if rows > 1 and (crossed := sorted({*range(0, tokens, tokens // rows)} - {*ends})):
        raise LengthsError(
            f"a document reaches over token {crossed[0]}, where a row of the batch of {rows} begins: let cu_seqlens end one "
            f"there, or pass all tokens as one row (1, {tokens})"
        )
