"""Denoising diffusion: random times and noise, a moving average of the weights by hand, and samples of the average."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import autopar  # autopar

times = 20
betas = torch.linspace(1e-3, 0.2, times)
alphas = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time, self.enter = nn.Embedding(times, width), nn.Linear(8, width)
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.leave = nn.Linear(width, 8)

    def forward(self, x, t):
        h = self.enter(x) + self.time(t)
        return self.leave(h + self.middle(h))


torch.manual_seed(0)
model = Denoiser()
example = (torch.zeros(16, 8), torch.zeros(16, dtype=torch.long))  # autopar
model = autopar.parallelize(model, "local", example_inputs=example)  # autopar
ema = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _step in range(4):
    x, t, noise = torch.randn(16, 8).tanh(), torch.randint(0, times, (16,)), torch.randn(16, 8)
    a = alphas[t][:, None]
    loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            average.mul_(0.9).add_(parameter, alpha=0.1)
    losses.append(loss.item())
ema.eval()
with torch.no_grad():
    x = torch.randn(16, 8)
    for t in reversed(range(times - 3, times)):
        predicted = ema(x, torch.full((16,), t))
        x = (x - betas[t] / (1 - alphas[t]).sqrt() * predicted) / (1 - betas[t]).sqrt() + betas[t].sqrt() * torch.randn(16, 8)
losses.append(x.square().mean().item())
print(losses)
