"""Packed batches: documents of different lengths in one row, each with positions of its own and no attention to the others."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar

length, words, width, heads = 16, 64, 32, 4


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, words)

    def forward(self, ids, document, position, labels):
        x = self.embed(ids) + self.positions(position)
        q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        same = document[:, :, None] == document[:, None, :]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=(same & causal)[:, None]).transpose(1, 2).flatten(2))
        logits = self.head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(size=16):
    ids, starts = torch.randint(0, words, (size, length)), torch.rand(size, length) < 0.2
    starts[:, 0] = True
    document = starts.long().cumsum(1)
    first = torch.where(starts, torch.arange(length), 0).cummax(1).values
    ends = F.pad(starts[:, 1:], (0, 1), value=True)
    labels = F.pad(ids[:, 1:], (0, 1)).masked_fill(ends, -100)
    return {"ids": ids, "document": document, "position": torch.arange(length) - first, "labels": labels}


torch.manual_seed(0)
batches = [batch() for _ in range(4)]
model = Packed()
model = autopar.parallelize(model, "local", example_inputs=batches[0])  # autopar
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for inputs in batches:
    loss = model(**inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
