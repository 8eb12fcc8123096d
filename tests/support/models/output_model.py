"""A small classifier that returns what models return: a dataclass of a loss and logits, a tuple, logits alone; in layers that
pipelines can cut."""

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
    """`returns`: ``fields`` (a `Result`), ``loss first``, ``loss last`` (tuples), ``logits``."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return Result(logits=logits) if self.returns == "fields" else logits
        loss = nn.functional.cross_entropy(logits, labels)
        if self.returns == "fields":
            return Result(loss, logits)
        return (loss, logits) if self.returns == "loss first" else (logits, loss)


def classifier(returns: str = "fields", seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(returns).double()


def examples(seed: int = 0, size: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (size,), generator=generator),
    }
