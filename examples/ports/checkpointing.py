"""Gradient checkpointing: layers are computed again in the backward, by torch.utils.checkpoint."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar  # autopar


class Layer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 128), nn.Linear(128, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(32, 8)

    def forward(self, x, y):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), y)


torch.manual_seed(0)
model = Net()
example = {"x": torch.zeros(16, 32), "y": torch.zeros(16, dtype=torch.long)}  # autopar
model = autopar.parallelize(model, "local", example_inputs=example)  # autopar
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _step in range(4):
    loss = model(x=torch.randn(16, 32), y=torch.randint(0, 8, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
