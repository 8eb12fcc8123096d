"""GANs, autoencoders, diffusion, NeRF."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip


class DcganPair(nn.Module):
    """arXiv 1511.06434: both losses in one forward; the discriminator is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()
        self.criterion = nn.BCELoss()

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise)
        yes, no = (self.discriminator(x).view(-1) for x in (real, fake.detach()))
        loss = self.criterion(yes, torch.ones_like(yes)) + self.criterion(no, torch.zeros_like(no))
        return loss + self.criterion(self.discriminator(fake).view(-1), torch.ones_like(no))


class VariationalAutoencoder(nn.Module):
    """arXiv 1312.6114, as in torch's examples; noise from outside or drawn."""

    def __init__(self, draws: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)
        self.draws = draws

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + (torch.randn_like(std) if self.draws else eps) * std
        recon = torch.sigmoid(self.fc4(F.relu(self.fc3(z))))
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class TiedAutoencoder(nn.Module):
    """Tied weights, and one batch norm that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8) * 0.2)
        self.norm = nn.BatchNorm1d(16)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.relu(self.norm(x) @ self.weight + self.bias)
        return F.mse_loss(self.norm(code @ self.weight.t()), x)


class MaskedAutoencoder(nn.Module):
    """arXiv 2111.06377: shuffles patches by sorted noise, which comes from outside here."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoderLayer(dim, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, 48)

    def forward(self, image: Tensor, noise: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        n, length, dim = x.shape
        keep = length // 4
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = shuffle[:, :keep]
        x = torch.gather(x, dim=1, index=kept.unsqueeze(-1).repeat(1, 1, dim))
        mask = torch.ones([n, length], device=x.device, dtype=x.dtype)
        mask[:, :keep] = 0
        mask = torch.gather(mask, dim=1, index=restore)
        x = self.encoder(x)
        x = torch.cat([x, self.mask_token.repeat(n, length - keep, 1)], dim=1)
        x = torch.gather(x, dim=1, index=restore.unsqueeze(-1).repeat(1, 1, dim)) + self.position
        x = self.out(self.decoder(x))
        target = image.reshape(n, 3, 4, 4, 4, 4)
        target = torch.einsum("nchpwq->nhwpqc", target).reshape(n, length, 48)
        loss = ((x - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum()


class DiffusionBlock(nn.Module):
    """A block of DiT, arXiv 2212.09748, with adaptive layer norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        y = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        b, n, d = y.shape
        q, k, v = self.qkv(y).reshape(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + gate1.unsqueeze(1) * self.out(y)
        y = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(y)


class DiffusionTransformer(nn.Module):
    """The training loss of a DiT; noise schedule as a plain tensor attribute."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.labels = nn.Embedding(5, dim)
        self.time = nn.Sequential(nn.Linear(8, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiffusionBlock(dim) for _ in range(2))
        self.final = nn.Linear(dim, 48)
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0)

    def embed(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        freqs = torch.exp(-math.log(10000) * torch.arange(0, 4, dtype=torch.float32) / 4).to(device=t.device)
        args = t[:, None].float() * freqs[None]
        return self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1).to(dtype))

    def forward(self, image: Tensor, t: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        alpha = self.alphas.to(image)[t].view(-1, 1, 1, 1)
        x = alpha.sqrt() * image + (1 - alpha).sqrt() * noise
        x = self.patch(x).flatten(2).transpose(1, 2)
        c = self.embed(t, x.dtype) + self.labels(label)
        for block in self.blocks:
            x = block(x, c)
        x = self.final(x).reshape(-1, 4, 4, 4, 4, 3)
        x = torch.einsum("nhwpqc->nchpwq", x).reshape(image.shape)
        return F.mse_loss(x, noise)


class RadianceField(nn.Module):
    """NeRF, arXiv 2003.08934: positional encoding, a skip, volume rendering by a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(27, 16), nn.Linear(16, 16), nn.Linear(16 + 27, 16)])
        self.color, self.density = nn.Linear(16, 3), nn.Linear(16, 1)

    def encode(self, x: Tensor) -> Tensor:
        return torch.cat([x, *(f(x * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos))], -1)

    def forward(self, origins: Tensor, directions: Tensor, target: Tensor) -> Tensor:
        depth = torch.linspace(2.0, 6.0, steps=8).to(origins)
        points = origins[..., None, :] + directions[..., None, :] * depth[..., :, None]
        x = encoded = self.encode(points)
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([x, encoded], -1) if i == 2 else x))
        gaps = torch.cat([depth[1:] - depth[:-1], torch.tensor([1e10]).to(depth)])
        alpha = 1.0 - torch.exp(-F.relu(self.density(x)[..., 0]) * gaps)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
        rgb = ((alpha * clear)[..., None] * torch.sigmoid(self.color(x))).sum(-2)
        return ((rgb - target) ** 2).mean()


class VectorQuantizer(nn.Module):
    """VQ-VAE, arXiv 1711.00937: nearest codes, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 4, 3, padding=1)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x).permute(0, 2, 1).contiguous()
        flat = z.view(-1, 8)
        weight = self.codes.weight
        distance = flat.pow(2).sum(1, keepdim=True) + weight.pow(2).sum(1) - 2 * torch.matmul(flat, weight.t())
        index = torch.argmin(distance, dim=1).unsqueeze(1)
        onehot = torch.zeros(index.shape[0], 16, device=x.device, dtype=x.dtype)
        onehot.scatter_(1, index, 1)
        quantized = torch.matmul(onehot, weight).view(z.shape)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        return loss + F.mse_loss(self.decoder(quantized.permute(0, 2, 1)), x)
