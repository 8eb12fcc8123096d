"""A decoder whose rotary embeddings are complex products with a table in a complex buffer, as Meta's Llama and torchtitan write
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KEY_HEADS, CLASSES, ROWS = 32, 4, 2, 64, 16
SIZE = WIDTH // HEADS


def table(rows: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    angles = torch.outer(torch.arange(rows), 1 / 100.0 ** (torch.arange(0, SIZE, 2) / SIZE))
    return torch.polar(torch.ones_like(angles), angles).to(dtype)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    wide = x.double() if factors.dtype == torch.complex128 else x.float()
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(3).type_as(x)


def repeat(x: Tensor, times: int) -> Tensor:
    batch, rows, heads, size = x.shape
    return x.unsqueeze(3).expand(batch, rows, heads, times, size).reshape(batch, rows, heads * times, size)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (linear(y).view(*x.shape[:2], -1, SIZE) for linear in (self.wq, self.wk, self.wv))
        factors = factors.view(1, x.shape[1], 1, -1)
        q, k = rotate(q, factors), rotate(k, factors)
        k, v = (repeat(each, HEADS // KEY_HEADS) for each in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return x + self.wo(out.transpose(1, 2).reshape(x.shape))


class ComplexRotary(nn.Module):
    """`persistent`: whether the table is in the state dict."""

    factors: Tensor

    def __init__(self, dtype: torch.dtype = torch.complex64, persistent: bool = False) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("factors", table(2 * ROWS, dtype), persistent=persistent)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.factors[: tokens.shape[1]])
        return F.cross_entropy(self.out(x).flatten(0, 1).to(self.factors.real.dtype), labels.flatten())
