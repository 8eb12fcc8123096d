"""The documents of tokens that stand one after the other, by where they begin (``cu_seqlens``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.autograd import has_data
from ...errors import LengthsError


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
