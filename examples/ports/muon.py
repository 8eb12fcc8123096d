"""Muon for the matrices of hidden layers beside AdamW for everything else."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar


class Net(nn.Module):
    def __init__(self, words=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids, targets):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
ids = torch.randint(0, 64, (4, 16, 9))
model = Net()
example = {"ids": ids[0, :, :-1], "targets": ids[0, :, 1:]}  # autopar
model = autopar.parallelize(model, "local", example_inputs=example)  # autopar
hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")]
rest = [p for name, p in model.named_parameters() if not (p.ndim == 2 and name.startswith("layers"))]
optimizers = [torch.optim.Muon(hidden, lr=0.01, momentum=0.95), torch.optim.AdamW(rest, lr=1e-3)]
losses = []
for rows in ids:
    loss = model(ids=rows[:, :-1], targets=rows[:, 1:])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    losses.append(loss.item())
print(losses)
