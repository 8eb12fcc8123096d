"""A small classifier that returns what models return: a dataclass of a loss and logits, a tuple, logits alone; in layers that
pipelines can cut. And one with batch norm between convolutions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, CLASSES, BATCH = 16, 8, 8


@dataclasses.dataclass
class Result:
    """As models of transformers return it."""

    loss: Tensor | None = None
    logits: Tensor | None = None


class Classifier(nn.Module):
    """Returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Fields(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Result:
        logits = super().forward(x)
        return Result(None if labels is None else nn.functional.cross_entropy(logits, labels), logits)


class LossFirst(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x)
        return nn.functional.cross_entropy(logits, labels), logits


class LossLast(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = super().forward(x)
        if labels is None:
            return logits, None
        loss = nn.functional.cross_entropy(logits, labels)
        return logits, loss


KINDS = {"logits": Classifier, "fields": Fields, "loss first": LossFirst, "loss last": LossLast}


def classifier(returns: str = "fields", seed: int = 0) -> Classifier:
    """`returns`: one of `KINDS`."""
    torch.manual_seed(seed)
    return KINDS[returns]().double()


def examples(seed: int = 0, size: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (size,), generator=generator),
    }


class Convolutions(nn.Module):
    """Batch norm between convolutions: it computes in float32 and hands on what autocast handed it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(torch.relu(self.norm(self.first(x))))
        return nn.functional.cross_entropy(self.head(h.mean((2, 3))), y)


def convolutions() -> Convolutions:
    torch.manual_seed(0)
    return Convolutions()


def pictures(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, 3, 8, 8, generator=generator),
        "y": torch.randint(0, CLASSES, (BATCH,), generator=generator),
    }
