"""A small mixture of experts in plain PyTorch that calls `autopar.ops.moe_experts`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ops import moe_experts


class RoutedMlp(nn.Module):
    """Plain PyTorch that calls the operator, beside a shared expert; a balancing loss of means over all tokens. `flat`: on all
    tokens in a row, which are one group for the capacity then."""

    def __init__(
        self, capacity: float | None = None, width: int = 16, inner: int = 24, number: int = 4, k: int = 2, flat: bool = False
    ) -> None:
        super().__init__()
        self.flat = flat
        self.k, self.capacity = k, capacity
        self.norm, self.gate, self.head = nn.LayerNorm(width), nn.Linear(width, number), nn.Linear(width, 8)
        self.up = nn.Parameter(torch.randn(number, width, inner) / 4)
        self.up_bias = nn.Parameter(torch.randn(number, inner) / 4)
        self.down = nn.Parameter(torch.randn(number, inner, width) / 4)
        self.down_bias = nn.Parameter(torch.randn(number, width) / 4)
        self.shared = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.norm(x).flatten(0, 1) if self.flat else self.norm(x)
        scores = self.gate(y).softmax(-1)
        weights, experts = scores.topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = moe_experts(
            y, experts, weights, self.up, self.down, self.up_bias, self.down_bias,
            activation="relu2", layout="plain transposed", capacity=self.capacity,
        )  # fmt: skip
        x = x + (mixed + self.shared(y)).view(x.shape)
        chosen = F.one_hot(experts, scores.shape[-1]).sum(-2).to(x.dtype)
        balance = (chosen.flatten(0, -2).mean(0) * scores.flatten(0, -2).mean(0)).sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * balance


def routed_batch(size: int) -> dict[str, Tensor]:
    """Sequences of twelve."""
    return {"x": torch.randn(size, 12, 16), "labels": torch.randint(0, 8, (size, 12))}
