"""nanoGPT: characters, decayed groups, warm-up and cosine, clipping, estimates of the loss in evaluation."""

import inspect
import json
import math

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar

text = inspect.getsource(json)
letters = sorted(set(text))
data = torch.tensor([letters.index(each) for each in text])
context, batch_size, width, heads, steps = 16, 16, 32, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (each.view(B, T, heads, C // heads).transpose(1, 2) for each in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(letters), width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, len(letters), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def get_batch():
    starts = torch.randint(len(data) - context, (batch_size,)).tolist()
    x = torch.stack([data[i : i + context] for i in starts])
    return x, torch.stack([data[i + 1 : i + 1 + context] for i in starts])


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = torch.stack([model(*get_batch())[1] for _ in range(2)]).mean().item()
    model.train()
    return out


torch.manual_seed(1337)
x, y = get_batch()
model = GPT()
model = autopar.parallelize(model, "local", example_inputs=(x, y))  # autopar
params = list(model.parameters())
groups = [
    {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
losses = []
for step in range(steps):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (step + 1) / 2 if step < 2 else 1e-3 * 0.5 * (1 + math.cos(math.pi * step / steps))
    if step % 2 == 0:
        losses.append(estimate_loss())
    logits, loss = model(x, y)
    x, y = get_batch()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    print(f"step {step}: loss {losses[-1]:.4f}")
