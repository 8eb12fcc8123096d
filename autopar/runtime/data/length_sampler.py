"""Batches of examples of like length, each padded to one of a few lengths: as many programs of a parallel model, however many
lengths its data has. `parallel.sampler(dataset, lengths=...)` makes the sampler."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RuntimeProblem
from .epoch_sampler import EpochSampler, check_positive

LOGGER = logging.getLogger("autopar")

LARGE_SHARE = 0.1
"""The share of examples that an epoch leaves out, or repeats, from which on it is a warning."""


class LengthBatchSampler(EpochSampler):
    """Yields the indices of this data rank's share of each global batch, for ``DataLoader(dataset, batch_sampler=...)``.

    A global batch holds examples of one bucket of lengths, those above one of `edges` and up to the next, and is padded to that
    (`padded_length`). Examples are drawn, and batches put in order, by the seed and the epoch, and do not depend on the number of
    ranks. Ranks get equally many examples of a batch, with close sums of lengths. What does not fill a batch of its bucket is
    left out (others in each epoch), or filled up with examples of the bucket that are in the epoch already (`drop_last=False`),
    as torch's DistributedSampler does."""

    def __init__(
        self,
        lengths: torch.Tensor,
        *,
        batch_size: int,
        rank: int = 0,
        num_replicas: int = 1,
        programs: int = 5,
        multiple: int = 8,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        """`lengths`: of every example, as `checked_lengths` returns them. `batch_size`: that of the global batch. `rank` of
        `num_replicas` is the place on the data axis. At most `programs` edges, which are multiples of `multiple`."""
        _check_sizes(len(lengths), batch_size, num_replicas, programs, multiple)
        super().__init__(lengths, shuffle, seed)
        self.batch_size, self.rank, self.num_replicas, self.drop_last = int(batch_size), rank, num_replicas, drop_last
        self.edges = length_edges(lengths, programs, multiple, batch_size)
        self.buckets = torch.bucketize(lengths, torch.tensor(self.edges))
        if not dist.is_initialized() or dist.get_rank() == 0:
            large = abs(len(lengths) - len(self) * batch_size) > LARGE_SHARE * len(lengths)
            LOGGER.log(logging.WARNING if large else logging.INFO, "batches by length: %s", self.words())

    def words(self) -> str:
        """Return the edges, and what they cost, in one line."""
        tokens, padded = int(self.lengths.sum()), torch.tensor(self.edges)[self.buckets]
        share = 1 - tokens / int(padded.sum())
        alone = 1 - tokens / (self.edges[-1] * len(self.lengths))
        count = f"{len(self.edges)} lengths" if len(self.edges) > 1 else "1 length"
        text = f"{count} ({', '.join(map(str, self.edges))}), {100 * share:.0f} % padding"
        if len(self.edges) > 1:
            text += f"; one length would pad {100 * alone:.0f} %"
        if more := len(self) * self.batch_size - len(self.lengths):
            what = f"repeats {more}" if more > 0 else f"leaves out {-more}"
            text += f"; an epoch {what} of {len(self.lengths)} examples, where a bucket is no whole number of batches"
        return text

    def padded_length(self, length: int) -> int:
        """Return the length that an example of this length, and each other of its batch, is padded to."""
        if not 0 < length <= self.edges[-1]:
            raise RuntimeProblem(
                f"an example has length {length}, and the sampler's lengths go from 1 to {self.edges[-1]}: give it those of the "
                "examples as the model gets them"
            )
        return next(edge for edge in self.edges if length <= edge)

    # -- the batches of an epoch

    def __len__(self) -> int:
        counts = torch.bincount(self.buckets, minlength=len(self.edges))
        more = 0 if self.drop_last else self.batch_size - 1
        return int(((counts + more) // self.batch_size).sum())

    def global_batches(self) -> torch.Tensor:
        """Return the examples of all global batches of this epoch, in order, one row each."""
        generator = self.generator()
        order, rows = self.drawn_order(generator), []
        for bucket in range(len(self.edges)):
            examples = order[self.buckets[order] == bucket]
            if rest := len(examples) % self.batch_size:
                more = examples[: self.batch_size - rest]
                examples = examples[:-rest] if self.drop_last else torch.cat([examples, more])
            rows.append(examples.view(-1, self.batch_size))
        batches = torch.cat(rows)
        return batches[torch.randperm(len(batches), generator=generator)] if self.shuffle else batches

    def batches(self) -> list[list[int]]:
        batches = self.global_batches()
        descending = self.lengths[batches].argsort(dim=1, descending=True, stable=True)
        # dealt out to and fro: the rank that gets the longest of a row gets the shortest of the next
        dealt = batches.gather(1, descending).view(len(batches), -1, self.num_replicas)
        dealt[:, 1::2] = dealt[:, 1::2].flip(-1)
        return dealt[:, :, self.rank].tolist()

    def sizes(self) -> dict[str, Any]:
        return {"drop_last": self.drop_last, "batch_size": self.batch_size, "edges": list(self.edges)}


def length_edges(lengths: torch.Tensor, most: int, multiple: int, fewest: int) -> tuple[int, ...]:
    """Return the lengths to pad to: at most `most` multiples of `multiple`, each for `fewest` examples or more, with the fewest
    padded tokens that such lengths can have.

    A dynamic program over the edges. ``cost[j]``, the padded length of all examples up to edge j, is the minimum over the edge i
    before of ``cost[i] + edge[j] * (examples up to j - examples up to i)``: of lines in ``edge[j]`` whose slope falls with i, so
    that their lower envelope is read from left to right, in linear time.
    """
    multiples, counts = torch.unique((lengths + multiple - 1) // multiple, return_counts=True)
    edges, ends = [0, *(multiples * multiple).tolist()], [0, *counts.cumsum(0).tolist()]
    cost: list[float] = [0, *(inf for _ in edges[1:])]
    total, before = inf, list[list[int]]()
    for _ in range(most):
        cost, chosen = _with_one_more(cost, edges, ends, fewest)
        if before and cost[-1] >= total:
            break
        total = cost[-1]
        before.append(chosen)
    places = [len(edges) - 1]
    for chosen in reversed(before):
        places.append(chosen[places[-1]])
    return tuple(edges[place] for place in reversed(places[:-1]))


def _with_one_more(cost: list[float], edges: list[int], ends: list[int], fewest: int) -> tuple[list[float], list[int]]:
    """Return the cost up to each edge with one edge more than in `cost`, and the edge before it."""

    def value(line: int, edge: int) -> float:
        return cost[line] - edge * ends[line]

    def useless(first: int, middle: int, last: int) -> bool:
        """Return whether the line of the middle one is nowhere below both others."""
        left = (cost[middle] - cost[first]) * (ends[last] - ends[middle])
        return left >= (cost[last] - cost[middle]) * (ends[middle] - ends[first])

    out: list[float] = [inf] * len(edges)
    chosen, lines = [0] * len(edges), list[int]()
    lowest = added = 0
    for place in range(1, len(edges)):
        while ends[place] - ends[added] >= fewest:
            if cost[added] < inf:
                while len(lines) > lowest + 1 and useless(lines[-2], lines[-1], added):
                    lines.pop()
                lines.append(added)
            added += 1
        while lowest + 1 < len(lines) and value(lines[lowest + 1], edges[place]) <= value(lines[lowest], edges[place]):
            lowest += 1
        if lines:
            chosen[place] = lines[lowest]
            out[place] = value(lines[lowest], edges[place]) + edges[place] * ends[place]
    return out, chosen


def _check_sizes(examples: int, batch_size: int, num_replicas: int, programs: int, multiple: int) -> None:
    check_positive(batch_size=batch_size, programs=programs, multiple=multiple)
    if batch_size % num_replicas:
        raise RuntimeProblem(
            f"a global batch of batch_size={batch_size} does not divide over dp={num_replicas}: give a multiple of {num_replicas}"
        )
    if examples < batch_size:
        raise RuntimeProblem(f"{examples} examples are fewer than a global batch of {batch_size}: give a smaller batch_size=")
