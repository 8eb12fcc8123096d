"""The runs of packed documents, and which ranks of a ring have a document in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import torch

from ...compat.autograd import has_data
from .merge import AttentionTile
from .rectangles import Band
from .ring import Ring

Numbers = list[int]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The document of every token of each row, and its position where that matters, as numbers."""

    documents: list[Numbers]
    positions: list[Numbers] | None

    @staticmethod
    def of(documents: torch.Tensor, positions: torch.Tensor | None, rank: int = 0) -> PackedRows:
        """Read tensors [rows, length]. Without data it is the part of `rank` of one document, whose positions count up."""
        if has_data(documents):
            return PackedRows(documents.tolist(), None if positions is None else positions.tolist())
        length = documents.shape[1]
        counted = None if positions is None else [list(range(rank * length, (rank + 1) * length))]
        return PackedRows([[0] * length], counted)

    def row(self, example: int) -> tuple[Numbers, Numbers | None]:
        """Return the documents and positions of an example: of one row for all, or of its own."""
        at = example % len(self.documents)
        return self.documents[at], None if self.positions is None else self.positions[example % len(self.positions)]

    def ranges(self, example: int) -> dict[int, tuple[int, int]]:
        """Return the least and the greatest position of every document; 0 without positions."""
        documents, positions = self.row(example)
        out: dict[int, tuple[int, int]] = {}
        for document, position in zip(documents, positions or [0] * len(documents), strict=True):
            low, high = out.get(document, (position, position))
            out[document] = min(low, position), max(high, position)
        return out


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


@dataclass(frozen=True, slots=True)
class DocumentRing(Ring):
    """A ring of packed documents: the `queries` and `keys` of every rank, and the pairs of ranks of which the first has queries
    that see keys of the second."""

    examples: int
    scale: float
    band: Band
    queries: tuple[PackedRows, ...]
    keys: tuple[PackedRows, ...]
    pairs: frozenset[tuple[int, int]]

    def sees(self, rank: int, step: int) -> bool:
        return (rank, (rank - step) % self.size) in self.pairs

    def runs(self, rank: int, device: torch.device) -> Iterator[DocumentRun]:
        """Yield what of this rank's queries attends to what of the keys of `rank`."""
        return document_runs(self.examples, self.scale, self.band, self.queries[self.coordinate], self.keys[rank], device)


def visible_pairs(
    examples: int, band: Band, queries: Sequence[PackedRows], keys: Sequence[PackedRows]
) -> frozenset[tuple[int, int]]:
    """Return which rank's queries see which rank's keys, judged by the documents that both have and the ranges of positions."""
    out = set()
    for example in range(examples):
        sides = [[rows.ranges(example) for rows in side] for side in (queries, keys)]
        for (rank, seeing), (other, seen) in product(*map(enumerate, sides)):
            if _overlap(seeing, seen, band, queries[rank].positions is not None):
                out.add((rank, other))
    return frozenset(out)


def _overlap(queries: dict[int, tuple[int, int]], keys: dict[int, tuple[int, int]], band: Band, ordered: bool) -> bool:
    """Return whether a query may see a key of its document, by the ranges of their positions."""
    for document in queries.keys() & keys.keys():
        (low, high), (first, last) = queries[document], keys[document]
        if not ordered or (first <= high and (band[0] is None or low - last <= band[0])):
            return True
    return False


def document_runs(
    examples: int, scale: float, band: Band, queries: PackedRows, keys: PackedRows, device: torch.device
) -> Iterator[DocumentRun]:
    """Yield what attends to what within the band of positions, row by row of the batch."""
    for example in range(examples):
        (documents, at), (others, seen) = queries.row(example), keys.row(example)
        columns = _places(others)
        for document, run in groupby(enumerate(documents), key=lambda each: each[1]):
            places = [place for place, _ in run]
            rows, here = slice(places[0], places[-1] + 1), columns.get(document)
            if here is not None:
                order = None if at is None or seen is None else (at[rows], [seen[place] for place in here])
                tile = _tile(len(places), len(here), order, band, scale, device)
                neighbours = here[-1] - here[0] + 1 == len(here)
                where = slice(here[0], here[-1] + 1) if neighbours else torch.tensor(here, device=device)
                yield DocumentRun(example, rows, where, tile)


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
