"""torch.compile of what autopar.parallelize returns."""

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


torch.manual_seed(0)
model = Net()
example = {"x": torch.zeros(16, 16), "y": torch.zeros(16, dtype=torch.long)}  # autopar
model = autopar.parallelize(model, "local", example_inputs=example)  # autopar
model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _step in range(3):
    loss = model(x=torch.randn(16, 16), y=torch.randint(0, 8, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses)
