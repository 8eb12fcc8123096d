"""Weights of files, and weights of a model that are several of them, stacked and concatenated: read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoint.tensor_file import mapped_tensor
from ..compat.dtensor import consecutive_runs
from ..state.weight_source import Weight, WeightInParts


class StoredWeight(NamedTuple):
    """A tensor of a file; `start`: its first byte in the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The weight itself, as the only tile of a `StackedWeight`."""
        return (Tile(self, (0,) * len(self.shape), self.shape),)


class Tile(NamedTuple):
    """A weight of a file, and which box of the stacked tensor it is."""

    weight: StoredWeight
    start: tuple[int, ...]
    size: tuple[int, ...]


class StackedWeight(NamedTuple):
    """A tensor of disjoint tiles. `file`: that of the first."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


FileWeight = StoredWeight | StackedWeight


def stacked(lists: Sequence[Sequence[StoredWeight]], stack: int | None, concatenate: int | None) -> StackedWeight | None:
    """Return each list stacked along a new dimension `stack` (None: not), and the results concatenated along `concatenate` (None:
    there is one). None where dtypes, shapes or numbers do not fit."""
    first = lists[0][0]
    boxes: list[tuple[StoredWeight, int, list[int]]] = []
    for each in lists:
        for number, weight in enumerate(each):
            size = list(weight.shape)
            if stack is not None:
                size.insert(stack, 1)
            boxes.append((weight, number, size))
    rank = len(boxes[0][2])
    joined = None if concatenate is None else concatenate % rank
    if joined is not None and joined == stack:
        return None
    apart = {tuple(n for dim, n in enumerate(size) if dim != joined) for _, _, size in boxes}
    even = stack is None or all(len(each) == len(lists[0]) and len({w.shape for w in each}) == 1 for each in lists)
    if len(apart) != 1 or not even or any(weight.dtype != first.dtype for weight, _, _ in boxes):
        return None
    shape, tiles, end = list(boxes[0][2]), [], 0
    for position, (weight, number, size) in enumerate(boxes):
        start = [0] * rank
        if stack is not None:
            start[stack] = number
        if joined is not None:
            start[joined] = end
            if stack is None or position + 1 == len(boxes) or boxes[position + 1][1] == 0:
                end += size[joined]
        tiles.append(Tile(weight, tuple(start), tuple(size)))
    if stack is not None:
        shape[stack] = len(lists[0])
    if joined is not None:
        shape[joined] = end
    return StackedWeight(first.file, first.dtype, tuple(shape), tuple(tiles))


def mapped(path: Path, weight: StoredWeight) -> torch.Tensor:
    """Return the tensor over a map of its own bytes of the file. DamagedCheckpoint where they cannot be read."""
    return mapped_tensor(path, weight.start, weight.dtype, weight.shape, remedy=": download or export it anew")


def opened(folder: Path, weight: FileWeight) -> Weight:
    """The tensor, of which bytes are read where they are looked at."""
    if isinstance(weight, StoredWeight):
        return mapped(folder / weight.file, weight)
    return WeightInParts(weight.shape, partial(_read, folder, weight))


def _read(folder: Path, weight: StackedWeight, positions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Read the positions from the files of their tiles."""
    out = torch.empty([len(each) for each in positions], dtype=weight.dtype)
    runs = [list(consecutive_runs(each)) for each in positions]
    for tile in weight.tiles:
        parts = [list(_within(run, start, size)) for run, start, size in zip(runs, tile.start, tile.size, strict=True)]
        if not prod(map(len, parts)):
            continue
        source = mapped(folder / tile.weight.file, tile.weight).view(tile.size)
        for box in product(*parts):
            to, come = out, source
            for dim, (begin, stored, count) in enumerate(box):
                to, come = to.narrow(dim, begin, count), come.narrow(dim, stored, count)
            to.copy_(come)
    return out


def _within(runs: Sequence[tuple[int, int, int]], start: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The parts of runs inside of a tile, with positions of the tile."""
    for begin, first, count in runs:
        low, high = max(first, start), min(first + count, start + size)
        if low < high:
            yield begin + low - first, low - start, high - low
