"""The ring of packed documents: the work of attention is shared out evenly, and a rank gets the keys that its queries see.

A shard of the sequence has as many tokens as any other, but the queries at the end of a long document see many keys, and those of
short documents few. So ranks with more than the mean of the pairs of queries and keys first lend the last queries of their runs,
each of which is the most work, to ranks with less; the results come back. Which ones is the same on all ranks, since each has the
documents and positions of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from ...compat.collectives import all_to_all_rows, wait_tensor
from .document_runs import Document, DocumentTile, PackedRuns, Run, document_tiles, seen_parts, with_rows_of_their_own
from .rectangles import Band, Spans
from .ring import Ring

Loans = dict[tuple[int, int], tuple[Run, ...]]
"""The queries that a rank lends, by it and the borrower."""


@dataclass(frozen=True, slots=True)
class DocumentRing(Ring):
    """A ring of packed documents. `queries` are those that each rank computes, as they lie on it: what it does not lend of its
    `own`, then what it borrows. `spans`: the rows of keys of an owner that a rank's queries see, by rank and owner."""

    scale: float
    band: Band
    keys: PackedRuns
    loans: Loans
    own: tuple[Run, ...]
    queries: tuple[tuple[Run, ...], ...]
    spans: dict[tuple[int, int], Spans]

    @staticmethod
    def of(
        size: int, coordinate: int, group: str, scale: float, band: Band, queries: PackedRuns, keys: PackedRuns
    ) -> DocumentRing:
        """Return the ring of ranks with these queries and keys."""
        loans, kept = balanced_loans(queries, keys, band)
        computed = tuple(
            with_rows_of_their_own(chain(runs, *(loans.get((lender, rank), ()) for lender in range(size)))) if loans else runs
            for rank, runs in enumerate(kept)
        )
        spans = _spans(computed, keys, band) if size > 1 else {}
        return DocumentRing(size, coordinate, group, scale, band, keys, loans, kept[coordinate], computed, spans)

    @property
    def part_rows(self) -> int:
        return sum(run.length for run in self.keys.ranks[0])

    def needed(self, rank: int, owner: int) -> Spans:
        return self.spans.get((rank, owner), ())

    def tiles(self, owner: int, device: torch.device) -> Iterator[DocumentTile]:
        """Yield what of this rank's queries attends to what of the keys of `owner`, as they lie on it, or where they arrived."""
        queries, keys = self.queries[self.coordinate], self.keys.ranks[owner]
        if owner != self.coordinate:
            seen = seen_parts(queries, keys, self.band, self.keys.ordered)
            keys = with_rows_of_their_own(sorted(seen, key=lambda run: run.start))
        return document_tiles(queries, keys, self.scale, self.band, self.keys.ordered, device)

    def exchange_queries(self, xs: Sequence[Tensor], back: bool = False) -> tuple[Tensor, ...]:
        """Return the rows [1, h, s, d] of the queries that this rank computes, or `back` at their places."""
        if not self.loans:
            return tuple(xs)
        lent = [self.loans.get((self.coordinate, rank), ()) for rank in range(self.size)]
        borrowed = [self.loans.get((rank, self.coordinate), ()) for rank in range(self.size)]
        out_rows, in_rows = ([sum(run.length for run in runs) for runs in each] for each in (lent, borrowed))
        own_rows = sum(run.length for run in self.own)
        widths = [x[:, :, :1].numel() for x in xs]
        places = [(run.start, run.length) for run in chain(self.own, *lent)]
        if back:
            out_rows, in_rows = in_rows, out_rows
        else:
            xs = [torch.cat([x.narrow(2, *place) for place in places], 2) for x in xs]
        blocks = [x[:, :, own_rows:].split(out_rows, 2) for x in xs]
        flat = torch.cat([block.reshape(-1) for rank in range(self.size) for block in (each[rank] for each in blocks)])
        received = wait_tensor(
            all_to_all_rows(flat, [rows * sum(widths) for rows in in_rows], [rows * sum(widths) for rows in out_rows], self.group)
        )
        pieces = received.split([rows * width for rows in in_rows for width in widths])
        results = []
        for index, x in enumerate(xs):
            arrived = [pieces[rank * len(xs) + index].view(*x.shape[:2], rows, x.shape[3]) for rank, rows in enumerate(in_rows)]
            joined = torch.cat([x[:, :, :own_rows], *arrived], 2)
            if back:
                parts = dict(zip(places, joined.split([length for _, length in places], 2), strict=True))
                joined = torch.cat([parts[place] for place in sorted(places)], 2)
            results.append(joined)
        return tuple(results)


def _spans(queries: Sequence[Sequence[Run]], keys: PackedRuns, band: Band) -> dict[tuple[int, int], Spans]:
    """Return the rows of keys that ranks need of others, of those with a document in common."""
    holders: dict[Document, set[int]] = {}
    for owner, runs in enumerate(keys.ranks):
        for run in runs:
            holders.setdefault(run.document, set()).add(owner)
    out = {}
    for rank, computed in enumerate(queries):
        for owner in sorted({owner for run in computed for owner in holders.get(run.document, ())} - {rank}):
            seen = sorted((run.start, run.length) for run in seen_parts(computed, keys.ranks[owner], band, keys.ordered))
            if seen:
                out[rank, owner] = tuple(seen)
    return out


def balanced_loans(queries: PackedRuns, keys: PackedRuns, band: Band) -> tuple[Loans, tuple[tuple[Run, ...], ...]]:
    """Return which ends of runs are lent to whom so that all ranks have the mean of the pairs of queries and keys, up to a row;
    and what each rank keeps.

    Of a rank with more than the mean those queries go that see most keys: the fewest rows are moved."""
    documents: dict[Document, tuple[int, int]] = {}
    for run in chain.from_iterable(keys.ranks):
        first, tokens = documents.get(run.document, (run.first, 0))
        documents[run.document] = min(first, run.first), tokens + run.length

    def pairs(run: Run) -> int:
        """The pairs of the run's queries and the keys that they see, of which none is missing."""
        first, tokens = documents.get(run.document, (run.first, 0))
        if not queries.ordered:
            return run.length * tokens
        return _pairs_below(run.first + run.length - first, band) - _pairs_below(run.first - first, band)

    kept, loans = [list(runs) for runs in queries.ranks], dict[tuple[int, int], list[Run]]()
    works = [sum(map(pairs, runs)) for runs in kept]
    mean = sum(works) // len(works)
    for lender in sorted(range(len(works)), key=lambda rank: -works[rank]):
        runs = kept[lender]
        while runs and works[lender] > mean:  # a rank of few rows may have lent all of its own, and borrowed one of more pairs
            borrower = min(range(len(works)), key=lambda rank: works[rank])
            most = min(works[lender] - mean, mean - works[borrower])
            at = max(range(len(runs)), key=lambda at: pairs(runs[at].end(1)))
            rows = max(1, bisect_right(range(runs[at].length + 1), most, key=lambda rows: pairs(runs[at].end(rows))) - 1)
            if works[borrower] + pairs(runs[at].end(rows)) >= works[lender]:
                break
            lent, rest = runs[at].end(rows), runs[at].part(0, runs[at].length - rows)
            runs[at : at + 1] = [rest] if rest.length else []
            loans.setdefault((lender, borrower), []).append(lent)
            works[lender] -= pairs(lent)
            works[borrower] += pairs(lent)
    return {pair: tuple(runs) for pair, runs in loans.items()}, tuple(map(tuple, kept))


def _pairs_below(position: int, band: Band) -> int:
    """Return the pairs of the queries of a document up to a position with the keys that they see."""
    alone = max(0, position)
    widened = alone if band[0] is None else min(alone, band[0] + 1)
    return widened * (widened + 1) // 2 + (alone - widened) * widened
