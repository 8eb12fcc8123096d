"""The runs of packed documents: neighbouring tokens of one document whose positions count up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from ...compat.autograd import has_data
from .merge import AttentionTile
from .rectangles import Band

Document = tuple[int, int]
"""The example, and the number of the document in it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a document from position `first` on: `length` rows of a tensor, from row `start` on. Examples lie end to end."""

    document: Document
    first: int
    start: int
    length: int

    def part(self, begin: int, end: int) -> Run:
        """Return tokens `begin` to `end` of the run."""
        return Run(self.document, self.first + begin, self.start + begin, end - begin)

    def end(self, length: int) -> Run:
        """Return its last tokens."""
        return self.part(self.length - length, self.length)


@dataclass(frozen=True, slots=True)
class PackedRuns:
    """The runs of a side of attention (queries or keys), of every rank in order. `ordered`: positions say who sees whom."""

    ranks: tuple[tuple[Run, ...], ...]
    ordered: bool

    @staticmethod
    def of(documents: Tensor, positions: Tensor | None, size: int, examples: int) -> PackedRuns:
        """Read the numbers [size * rows, length] of every rank's shard, where a row of one for all examples stands for each.
        Numbers without data are one document, whose positions count up."""
        ordered, length = positions is not None, documents.shape[1]
        if not has_data(documents):
            return PackedRuns(tuple(
                tuple(Run((example, 0), rank * length, example * length, length) for example in range(examples))
                for rank in range(size)
            ), ordered)  # fmt: skip
        numbers, places = (_by_rank(x, size, examples) for x in (documents, documents if positions is None else positions))
        starts = numbers[:, 1:] != numbers[:, :-1]
        if ordered:
            starts = starts | (places[:, 1:] != places[:, :-1] + 1)
        starts = torch.nn.functional.pad(starts, (1, 0), value=True)
        starts[:, ::length] = True
        (first,) = starts.flatten().nonzero(as_tuple=True)
        lengths = first.diff(append=first.new_tensor([starts.numel()]))
        out: list[list[Run]] = [[] for _ in range(size)]
        # one copy to the host for all runs of all ranks
        for at, count, number, place in torch.stack(
            [first, lengths, numbers.flatten()[first], places.flatten()[first]], 1
        ).tolist():
            rank, row = divmod(at, examples * length)
            out[rank].append(Run((row // length, number), place if ordered else 0, row, count))
        return PackedRuns(tuple(map(tuple, out)), ordered)


def _by_rank(x: Tensor, size: int, examples: int) -> Tensor:
    """Return numbers [size * rows, length] as int64 [size, examples * length]."""
    return x.view(size, -1, x.shape[1]).expand(size, examples, x.shape[1]).reshape(size, -1).long()


def seen_parts(queries: Iterable[Run], keys: Iterable[Run], band: Band, ordered: bool) -> list[Run]:
    """Return the parts of runs of keys that queries see, by the least and the greatest position that they have of a document."""
    ranges: dict[Document, tuple[int, int]] = {}
    for run in queries:
        last = run.first + run.length - 1
        low, high = ranges.get(run.document, (run.first, last))
        ranges[run.document] = min(low, run.first), max(high, last)
    out = []
    for run in keys:
        if run.document in ranges:
            low, high = ranges[run.document]
            begin = 0 if not ordered or band[0] is None else max(0, low - band[0] - run.first)
            end = min(run.length, high + 1 - run.first) if ordered else run.length
            if begin < end:
                out.append(run.part(begin, end))
    return out


def with_rows_of_their_own(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the runs as they lie in a tensor that holds only them, in order."""
    out, start = list[Run](), 0
    for run in runs:
        out.append(replace(run, start=start))
        start += run.length
    return tuple(out)


@dataclass(frozen=True, slots=True)
class DocumentTile:
    """Neighbouring queries of one document, from row `start` on of examples end to end, and the rows of its keys (a slice where
    they are neighbours). `tile`: how they see each other."""

    start: int
    length: int
    keys: slice | Tensor
    tile: AttentionTile

    def rows(self, length: int) -> tuple[int, slice]:
        """Return the example and its rows, in tensors of examples of `length` rows."""
        example, first = divmod(self.start, length)
        return example, slice(first, first + self.length)

    def places(self, length: int) -> tuple[slice, slice, slice | Tensor]:
        """Return the index of the keys, in tensors [B, g, length, d]."""
        first = self.keys.start if isinstance(self.keys, slice) else int(self.keys[0])
        before = first - first % length
        keys = slice(first - before, self.keys.stop - before) if isinstance(self.keys, slice) else self.keys - before
        return slice(first // length, first // length + 1), slice(None), keys


def document_tiles(
    queries: Iterable[Run], keys: Iterable[Run], scale: float, band: Band, ordered: bool, device: torch.device
) -> Iterator[DocumentTile]:
    """Yield what attends to what within the band of positions."""
    columns: dict[Document, list[Run]] = {}
    for run in keys:
        columns.setdefault(run.document, []).append(run)
    for document, group in groupby(queries, key=lambda run: run.document):
        rows, seen = list(group), columns.get(document, [])
        for start, end in _neighbours(rows) if seen else ():
            part = rows[start:end]
            tile = _tile(part, seen, scale, band, ordered, device)
            yield DocumentTile(part[0].start, sum(run.length for run in part), _places(seen, device), tile)


def _neighbours(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of runs that are neighbouring rows."""
    start = 0
    for at in range(1, len(runs) + 1):
        if at == len(runs) or runs[at].start != runs[at - 1].start + runs[at - 1].length:
            yield start, at
            start = at


def _places(runs: Sequence[Run], device: torch.device) -> slice | Tensor:
    if len(list(_neighbours(runs))) == 1:
        return slice(runs[0].start, runs[-1].start + runs[-1].length)
    return torch.cat([torch.arange(run.start, run.start + run.length, device=device) for run in runs])


def _tile(
    rows: Sequence[Run], columns: Sequence[Run], scale: float, band: Band, ordered: bool, device: torch.device
) -> AttentionTile:
    """Return the tile of queries and keys of one document: with a band where their positions count up, else, of tokens in any
    order, with a mask of its own size."""
    height, width = (sum(run.length for run in runs) for runs in (rows, columns))
    if not ordered:
        return AttentionTile(((0, height),), ((0, width),), (None, None), scale)
    if 2 * len(rows) <= 1 + height and 2 * len(columns) <= 1 + width:
        at, seen = (tuple((run.first, run.length) for run in runs) for runs in (rows, columns))
        return AttentionTile(at, seen, band, scale)
    places, others = (
        torch.cat([torch.arange(run.first, run.first + run.length, device=device) for run in runs]) for runs in (rows, columns)
    )
    distances = places.unsqueeze(1) - others
    allowed = (distances >= 0) & (distances <= (distances.max() if band[0] is None else band[0]))
    return AttentionTile(((0, height),), ((0, width),), (None, None), scale, allowed.view(1, 1, height, width))
