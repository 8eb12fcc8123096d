"""Recommendation, tables, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dlrm(nn.Module):
    """arXiv 1906.00091: embedding bags whose ids are [tables, batch * bag], with offsets; dot interaction."""

    def __init__(self, tables: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, dim, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(dim + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
        self.loss_fn = nn.BCELoss(reduction="mean")

    def forward(self, dense_x: Tensor, lS_i: Tensor, y: Tensor) -> Tensor:
        x = self.bottom(dense_x)
        ly = [bag(lS_i[k]) for k, bag in enumerate(self.bags)]
        t = torch.cat([x] + ly, dim=1).view((x.shape[0], -1, x.shape[1]))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        ni, nj = z.shape[1], z.shape[2]
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        flat = z[:, li, lj]
        return self.loss_fn(self.top(torch.cat([x] + [flat], dim=1)), y)


class TabTransformer(nn.Module):
    """arXiv 2012.06678: offsets of categories in one table, column embeddings, GEGLU."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        categories = (5, 7, 4)
        offsets = F.pad(torch.tensor(list(categories)), (1, 0), value=2).cumsum(dim=-1)[:-1]
        self.register_buffer("offsets", offsets)
        self.embed = nn.Embedding(2 + sum(categories), dim)
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff1, self.ff2 = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)
        self.numbers = nn.LayerNorm(3)
        self.out = nn.Sequential(nn.Linear(3 * dim + 3, 32), nn.SELU(), nn.Linear(32, 1))

    def forward(self, categories: Tensor, numbers: Tensor, y: Tensor) -> Tensor:
        x = self.embed(categories + self.offsets)
        z = self.norm(x)
        x = x + self.attention(z, z, z)[0]
        a, gates = self.ff1(x).chunk(2, dim=-1)
        x = x + self.ff2(a * F.gelu(gates))
        x = torch.concat((x.flatten(1), self.numbers(numbers)), dim=-1)
        return F.binary_cross_entropy_with_logits(self.out(x).squeeze(-1), y)


class GraphAttention(nn.Module):
    """GAT, arXiv 1710.10903, on dense adjacencies of a batch of graphs."""

    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.w = nn.ModuleList(nn.Linear(6, dim, bias=False) for _ in range(heads))
        self.a1 = nn.ParameterList(nn.Parameter(torch.randn(dim, 1)) for _ in range(heads))
        self.a2 = nn.ParameterList(nn.Parameter(torch.randn(dim, 1)) for _ in range(heads))
        self.out = nn.Linear(heads * dim, 4)

    def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Tensor:
        found = []
        for w, a1, a2 in zip(self.w, self.a1, self.a2):  # noqa: B905
            h = w(x)
            e = F.leaky_relu(h @ a1 + (h @ a2).transpose(1, 2), 0.2)
            zero = -9e15 * torch.ones_like(e)
            attention = F.softmax(torch.where(adjacency > 0, e, zero), dim=-1)
            found.append(F.elu(torch.matmul(attention, h)))
        return F.nll_loss(F.log_softmax(self.out(torch.cat(found, dim=-1)).mean(1), dim=-1), y)


class FactorizationMachine(nn.Module):
    """DeepFM, arXiv 1703.04247: inputs named like operations."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear, self.embed = nn.Embedding(30, 1), nn.Embedding(30, dim)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(4 * dim, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 1))

    def forward(self, cat: Tensor, mean: Tensor, linear: Tensor) -> Tensor:
        e = self.embed(cat) * mean.unsqueeze(-1)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        x = self.bias + (self.linear(cat).squeeze(-1) * mean).sum(1, keepdim=True) + pairs + self.deep(e.flatten(1))
        return F.binary_cross_entropy(torch.sigmoid(x.squeeze(1)), linear)


class PointNet(nn.Module):
    """arXiv 1612.00593: shared layers, a max over points, a learned transform with its regularizer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 8, 1), nn.Conv1d(3, 16, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(8), nn.BatchNorm1d(16)
        self.t, self.out = nn.Linear(8, 9), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        g = torch.max(F.relu(self.bn1(self.conv1(x))), 2, keepdim=True)[0].view(-1, 8)
        iden = torch.eye(3).view(1, 9).repeat(x.size(0), 1).to(x)
        t = (self.t(g) + iden).view(-1, 3, 3)
        x = torch.bmm(x.transpose(2, 1), t).transpose(2, 1)
        x = torch.max(self.bn2(self.conv2(x)), 2)[0]
        loss = F.nll_loss(F.log_softmax(self.out(x), dim=-1), y)
        eye = torch.eye(3, dtype=x.dtype)[None, :, :]
        return loss + 0.001 * torch.mean(torch.norm(torch.bmm(t, t.transpose(2, 1)) - eye, dim=(1, 2)))


class Autocast(nn.Module):
    """`torch.autocast` by the device of an input, and `x.type(other.type())`, as in public code."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            h = torch.tanh(self.one(x.type(x.type())))
        return F.mse_loss(self.two(h), y.type(h.type()))


class TopicModel(nn.Module):
    """Writes by index: rows of a buffer of zeros are filled by `index_put` and `tile`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, where: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        slots = torch.zeros(x.shape[0], 4, 8, dtype=h.dtype, device=h.device)
        slots[torch.arange(x.shape[0], device=x.device), where] = h
        slots = slots + torch.tile(h.unsqueeze(1), (1, 4, 1))
        return F.mse_loss(self.out(slots[:, [-1]]).squeeze(1), y)
