"""A generative adversarial network: two models, two optimizers, a detached and an attached pass through the discriminator."""

import torch
from torch import nn

import autopar  # autopar

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
D = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
G, D = autopar.parallelize([G, D], "local", [(torch.zeros(16, 8),), (torch.zeros(16, 16),)])  # autopar
criterion = nn.BCEWithLogitsLoss()
optim_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
optim_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
ones, zeros, losses = torch.ones(16, 1), torch.zeros(16, 1), []
for _step in range(3):
    real, noise = torch.randn(16, 16) * 0.5 + 1, torch.randn(16, 8)
    fake = G(noise)
    D.zero_grad()
    loss_d = criterion(D(real), ones) + criterion(D(fake.detach()), zeros)
    loss_d.backward()
    optim_d.step()
    G.zero_grad()
    loss_g = criterion(D(fake), ones)
    loss_g.backward()
    optim_g.step()
    losses += [loss_d.item(), loss_g.item()]
print(losses)
