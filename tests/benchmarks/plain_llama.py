"""A Llama in plain PyTorch, so that autopar and hand-written parallelism start from the same model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of the benchmark's model."""

    hidden: int = 1024
    ffn: int = 2816
    layers: int = 4
    heads: int = 16
    kv_heads: int = 8
    vocabulary: int = 8192


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[B, N, S, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention; the number of heads is read off the projections, so that a sharded one works too."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_size = sizes.hidden // sizes.heads
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.head_size, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * self.head_size, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * self.head_size, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head_size, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (w(x).view(B, S, -1, self.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.hidden)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Returns the mean next-token loss of ``labels [B, S]`` (already shifted)."""

    def __init__(self, sizes: LlamaSizes, sequence: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        half = sizes.hidden // sizes.heads // 2
        angles = torch.outer(torch.arange(sequence).float(), 10000.0 ** (-torch.arange(half).float() / half))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
