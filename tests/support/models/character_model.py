"""A small causal language model as training scripts write them: its own optimizer groups, and its own loop that samples."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            y.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for y in self.project(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class CharacterLayer(nn.Module):
    """Attention and two linears."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))  # type: ignore[no-any-return]


class CharacterModel(nn.Module):
    """Returns (logits, loss); without targets the logits of the last position, and no loss."""

    def __init__(self, words: int = 32, width: int = 32, heads: int = 4, layers: int = 2, block_size: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(block_size=block_size)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(block_size, width)
        self.layers = nn.ModuleList(CharacterLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = ids.shape[1]
        assert length <= self.config.block_size
        x = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def make_optimizer(self, decay: float, rate: float) -> torch.optim.Optimizer:
        """Matrices decay, vectors do not."""
        every = [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]
        groups = [
            {"params": [each for each in every if each.dim() >= 2], "weight_decay": decay},
            {"params": [each for each in every if each.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, ids: Tensor, tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Samples one token after the other."""
        for _ in range(tokens):
            logits, _ = self(ids[:, -self.config.block_size :])
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                least = torch.topk(logits, top_k).values[:, [-1]]
                logits = logits.masked_fill(logits < least, -torch.inf)
            ids = torch.cat((ids, torch.multinomial(F.softmax(logits, dim=-1), 1)), 1)
        return ids
