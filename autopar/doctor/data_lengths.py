"""The lengths of documents in the batches of a loader, as `--lengths` and ``document_lengths=`` take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch

from autopar.errors import BatchError

MOST_BATCHES = 1000


def document_lengths(batches: Iterable[Any], most_batches: int = MOST_BATCHES) -> dict[int, int]:
    """Return how many documents have each length in the first batches: position ids that restart end a document, else a row of
    ``attention_mask`` or of ``input_ids`` is one. BatchError where a batch has none of them."""
    if not isinstance(batches, Iterable):
        raise BatchError(f"the data is {type(batches).__name__}: return a loader, or another iterable of batches")
    counts: Counter[int] = Counter()
    for batch in islice(batches, most_batches):
        counts.update(_lengths_in(batch))
    if not counts:
        raise BatchError("the data has no batch with tokens: give a loader that yields some")
    return dict(sorted(counts.items()))


def _lengths_in(batch: Any) -> Iterable[int]:
    fields: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {}
    found = {name: fields[name] for name in ("position_ids", "attention_mask", "input_ids") if _is_table(fields.get(name))}
    if not found:
        kind = f"a dict of {', '.join(map(str, fields))}" if fields else type(batch).__name__
        raise BatchError(f"a batch is {kind}: yield dicts with position_ids, attention_mask or input_ids of [B, S]")
    name, rows = next(iter(found.items()))
    if name == "attention_mask":
        return [length for length in rows.ne(0).sum(1).tolist() if length]
    if name == "input_ids":
        return [rows.shape[1]] * rows.shape[0] if rows.shape[1] else []
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    places = [[*row.nonzero().flatten().tolist(), rows.shape[1]] for row in starts]
    return [end - begin for row in places for begin, end in zip(row, row[1:], strict=False)]


def _is_table(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2
