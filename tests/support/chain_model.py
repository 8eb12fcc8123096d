"""The model of runs that fail: four layers of two linear ones, and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Chain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


def model_and_batch(width: int = 8) -> tuple[Chain, dict[str, Tensor]]:
    """The model, and a batch for it."""
    torch.manual_seed(0)
    return Chain(width), {"x": torch.randn(16, width), "y": torch.randn(16, 4)}
