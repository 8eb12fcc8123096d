"""Rows of packed documents: each global batch is one row of a fixed number of tokens. `parallel.sampler(dataset, lengths=...,
packed_tokens=...)` makes the sampler.

A row that is sharded over the data ranks is data parallelism, context parallelism and any mixture of both: a document in one
shard takes one rank, a longer one as many as it needs, keys pass only between ranks that share a document, and the work of
attention is shared out evenly (`ops.attention.document_ring`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RuntimeProblem
from .epoch_sampler import EpochSampler, check_positive

LOGGER = logging.getLogger("autopar")

IGNORED = -100
"""The label that losses of torch and transformers leave out."""

PADDING = 128
"""Tokens of a document of padding: attention within one takes their square."""

Example = Mapping[str, Any]


class PackedBatchSampler(EpochSampler):
    """Yields the indices of the documents of each row, on all ranks alike, for
    ``DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collate)``.

    Documents come in the order that the seed and the epoch draw, each into the row in which it leaves the least room, else into a
    new one: every document once an epoch, whatever the number of ranks."""

    def __init__(self, lengths: Tensor, *, packed_tokens: int, shuffle: bool = True, seed: int = 0) -> None:
        """`lengths`: of every document, as `checked_lengths` returns them. `packed_tokens`: of a row."""
        check_positive(packed_tokens=packed_tokens)
        if len(lengths) and (longest := int(lengths.max())) > packed_tokens:
            place = int(lengths.argmax())
            raise RuntimeProblem(
                f"document {place} has {longest} tokens, and a row packed_tokens={packed_tokens}: give longer rows, or cut the "
                "document"
            )
        super().__init__(lengths, shuffle, seed)
        self.packed_tokens = int(packed_tokens)
        self._rows: tuple[int, list[list[int]]] = -1, []
        if not dist.is_initialized() or dist.get_rank() == 0:
            LOGGER.info("packed documents: %s", self.words())

    def words(self) -> str:
        """Return in one line how full the rows of this epoch are."""
        rows, tokens = len(self), int(self.lengths.sum())
        padding = 1 - tokens / max(1, rows * self.packed_tokens)
        return f"{rows} rows of {self.packed_tokens} tokens, {100 * padding:.1f} % padding"

    def batches(self) -> list[list[int]]:
        epoch, rows = self._rows
        if epoch != self.epoch:
            rows = self._drawn_rows()
            self._rows = self.epoch, rows
        return rows

    def _drawn_rows(self) -> list[list[int]]:
        generator = self.generator()
        order = self.drawn_order(generator)
        rows = best_fit(order.tolist(), self.lengths[order].tolist(), self.packed_tokens)
        return [rows[at] for at in torch.randperm(len(rows), generator=generator).tolist()] if self.shuffle else rows

    def __len__(self) -> int:
        return len(self.batches())

    def sizes(self) -> dict[str, Any]:
        return {"packed_tokens": self.packed_tokens}

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return one row [1, packed_tokens] of every argument that the examples have: numbers of each token, end to end.

        As `DataCollatorWithFlattening` of transformers does, it adds ``position_ids`` that restart with each document, and
        ``labels`` that are the ids where there are none, without the first token of each document, which no token before it
        predicts. What is left of the row are short documents of zeros, without labels."""
        rows = [{"labels": example["input_ids"], **example} if "input_ids" in example else dict(example) for example in examples]
        names = [name for name in rows[0] if name not in ("attention_mask", "position_ids")]
        parts: dict[str, list[Tensor]] = {name: [] for name in (*names, "position_ids")}
        for place, row in enumerate(rows):
            tensors = {name: _numbers(place, name, row[name]) for name in names if name in row}
            shapes = {name: tuple(x.shape) for name, x in tensors.items()}
            if len(tensors) < len(names) or len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
                raise RuntimeProblem(
                    f"example {place} of a packed row has {shapes}, the first one {', '.join(names)}: give each as many numbers "
                    "of each as it has tokens"
                )
            (length,) = {shape[0] for shape in shapes.values()}
            _check_one_document(place, row, length)
            tensors["position_ids"] = torch.arange(length)
            if "labels" in tensors:
                tensors["labels"] = tensors["labels"].clone()
                tensors["labels"][:1] = IGNORED
            for name, x in tensors.items():
                parts[name].append(x)
        used = sum(map(len, parts["position_ids"]))
        if used > self.packed_tokens:
            raise RuntimeProblem(
                f"the documents of a row have {used} tokens, more than packed_tokens={self.packed_tokens}: the lengths that the "
                "sampler was given are not those of the examples"
            )
        rest = self.packed_tokens - used
        padding = {name: torch.full((rest, *xs[0].shape[1:]), IGNORED * (name == "labels"), dtype=xs[0].dtype)
                   for name, xs in parts.items()} | {"position_ids": torch.arange(rest) % PADDING}  # fmt: skip
        return {name: torch.cat([*xs, padding[name]]).unsqueeze(0) for name, xs in parts.items()}


def _numbers(place: int, name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise RuntimeProblem(
            f"{name} of example {place} of a packed row is no numbers of each token: leave it out of the data set "
            f"(dataset.remove_columns([{name!r}]))"
        ) from None


def _check_one_document(place: int, row: Example, length: int) -> None:
    """Raise RuntimeProblem for an example that is padded, or packed already: neither would be kept apart here."""
    mask, positions = (torch.as_tensor(row.get(name, fill)) for name, fill in (("attention_mask", 1), ("position_ids", 0)))
    if not mask.all():
        raise RuntimeProblem(f"example {place} of a packed row is padded: give documents without padding, and their lengths")
    if "position_ids" in row and positions.tolist() != list(range(length)):
        raise RuntimeProblem(f"position_ids of example {place} of a packed row do not count from 0: give one document an example")


def best_fit(documents: Iterable[int], lengths: Iterable[int], tokens: int) -> list[list[int]]:
    """Return rows of documents of at most so many tokens: each document goes, in order, where it leaves the least room.

    Bit r of `rooms` says that a row has room for r tokens, so that the least room that suffices is the lowest bit from the
    document's length on."""
    rows, by_room, rooms = list[list[int]](), dict[int, list[int]](), 0
    for document, length in zip(documents, lengths, strict=True):
        if above := rooms >> length:
            room = length + (above & -above).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = tokens, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - length
        by_room.setdefault(left, []).append(row)
        rooms |= 1 << left
    return rows
