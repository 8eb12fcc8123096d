"""A language model of packed documents that calls torch's `varlen_attn`, and its loss one document at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 48, 32, 4, 2


class Documents(NamedTuple):
    """What torchtitan hands to attention."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class VarlenLayer(nn.Module):
    def __init__(self, window: tuple[int, int], scale: float | None) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.window, self.scale = window, scale
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * size)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        return varlen_attn(q, k, v, *documents, scale=self.scale, window_size=self.window, enable_gqa=True)

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        packed = self.qkv(self.norm(x)).unflatten(-1, (HEADS + 2 * KEY_HEADS, -1))
        flat = packed if x.dim() == 2 else packed.flatten(0, 1)
        y = self.attend(*flat.split([HEADS, KEY_HEADS, KEY_HEADS], 1), documents)
        x = x + self.out(y.reshape(x.shape))
        return x + self.mlp(x)


class VarlenModel(nn.Module):
    """Tokens ``[B, S]``, or ``[T]``; `one_input`: ``cu_seqlens`` is an input, else a tuple of what the kernel takes."""

    def __init__(self, window: tuple[int, int] = (-1, 0), scale: float | None = None, layers: int = 2) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(VarlenLayer(window, scale) for _ in range(layers))

    def forward(
        self, ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None, max_length: int = 0,
        documents: Documents | None = None,
    ) -> Tensor:  # fmt: skip
        if documents is None:
            assert cu_seqlens is not None
            documents = Documents(cu_seqlens, cu_seqlens, max_length, max_length)
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, documents)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def packed_tokens(lengths: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """A batch of documents of these lengths, one after the other, in tokens of this shape."""
    torch.manual_seed(1)
    ids, labels = (torch.randint(0, VOCABULARY, shape) for _ in range(2))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"ids": ids, "labels": labels, "cu_seqlens": ends}
