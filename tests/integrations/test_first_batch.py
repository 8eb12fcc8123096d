"""Reading the first batch for a plan: afterwards a loader gives what a fresh one gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from autopar.errors import AutoparError
from autopar.integrations.first_batch import first_batch

ROWS = 10


class Stream(IterableDataset[Any]):
    """Goes on where it was, as a socket does."""

    def __init__(self, rows: Iterator[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            yield {"row": row}


class Itself(Stream):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return {"row": next(self.rows)}


class Epochs(IterableDataset[Any]):
    """Counts its epochs."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter([{"row": 100 * self.epoch + row} for row in range(ROWS)])


class Shuffled(IterableDataset[Any]):
    """Starts again, in an order that the global generator draws."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"row": row} for row in random.sample(range(ROWS), ROWS)])


class Cropped(Dataset[Any]):
    """Rows with a generator of their own."""

    def __init__(self) -> None:
        self.draws = numpy.random.RandomState(0)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return {"row": 1000 * row + self.draws.randint(1000)}


class Counting(RandomSampler):
    """Another order in each epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(row + self.epoch) % ROWS for row in range(ROWS)])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def popping(examples: list[Any]) -> torch.Tensor:
    """Changes the examples, as collate functions of transformers do."""
    return torch.tensor([each.pop("row") for each in examples])


def rows() -> Any:
    return [{"row": row} for row in range(ROWS)]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "iterator": lambda: DataLoader(Stream(iter(range(ROWS))), 4, collate_fn=popping),
    "generator": lambda: DataLoader(Stream(row for row in range(ROWS)), 4),
    "itself": lambda: DataLoader(Itself(iter(range(ROWS))), 4, drop_last=True),
    "single examples": lambda: DataLoader(Stream(iter(range(ROWS))), batch_size=None),
    "epochs": lambda: DataLoader(Epochs(), 4),
    "starts again": lambda: DataLoader(Shuffled(), 4),
    "shuffle": lambda: DataLoader(rows(), 4, shuffle=True, generator=seeded()),
    "weights": lambda: DataLoader(rows(), 4, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS, generator=seeded())),
    "counting sampler": lambda: DataLoader(rows(), 4, sampler=Counting(rows())),
    "own generator": lambda: DataLoader(Cropped(), 4),
}


def rows_of(loader: DataLoader[Any]) -> list[list[int]]:
    """The rows of two epochs."""
    random.seed(3), torch.manual_seed(3)
    epochs = []
    for _ in range(2):
        batches = [batch if isinstance(batch, torch.Tensor) else batch["row"] for batch in loader]
        epochs.append([int(row) for batch in batches for row in torch.as_tensor(batch).reshape(-1)])
    return epochs


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_all_after_it(name: str) -> None:
    expected = rows_of(LOADERS[name]())
    loader = LOADERS[name]()
    kind = type(loader.dataset)
    random.seed(7), torch.manual_seed(7)
    batch = first_batch(loader)
    assert isinstance(loader.dataset, kind) and random.random() == random.Random(7).random()
    assert rows_of(loader) == expected and type(loader.dataset) is kind
    size = loader.batch_size or 1
    read = torch.as_tensor(batch["row"] if isinstance(batch, dict) else batch).reshape(-1).tolist()
    assert name == "starts again" or read == expected[0][:size]


def test_data_without_a_batch_are_refused() -> None:
    for loader in (DataLoader(Stream(iter(())), 4), DataLoader(Stream(iter(range(3))), 4, drop_last=True), DataLoader([], 4)):
        with pytest.raises(AutoparError, match="give it data, or pass example_inputs"):
            first_batch(loader)
