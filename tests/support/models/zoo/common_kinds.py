"""Small versions of kinds of models that people bring: factories for ``file.py:factory``, with random numbers, dropout, batch
norm, results of many forms, and mixed dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH = 32, 8


def _images(batch: int, size: int = 8) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, 3, size, size), "target": torch.randint(10, (batch,))}


class DropPath(nn.Module):
    """Stochastic depth, as timm has it (Swin, ConvNeXt)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))
        self.path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.path((self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.ModuleList(ConvNeXtBlock(WIDTH, 0.3) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), target)


def convnext(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return ConvNeXt(), _images(batch)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dropout: float, path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout))
        self.path = DropPath(path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.path(self.attention(self.norm1(x)))
        return x + self.path(self.mlp(self.norm2(x)))


class NanoGpt(nn.Module):
    """Returns (logits, loss), as nanoGPT does; with dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(0.1) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device)))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def nanogpt(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    idx = torch.randint(64, (batch, LENGTH))
    return NanoGpt(), {"idx": idx, "targets": idx.roll(-1, 1)}


class Vae(nn.Module):
    """Draws in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 16), nn.Linear(64, 16)
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        found = self.decoder(z)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return {"loss": F.mse_loss(found, x) + 0.1 * divergence, "reconstruction": found}


def vae(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Vae(), {"x": torch.randn(batch, WIDTH)}


class Mae(nn.Module):
    """Random masks by sorting noise (arXiv 2111.06377)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mask = nn.Linear(12, WIDTH), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layer, self.head = Layer(0.0), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2) if x.dim() == 4 else x
        h = self.embed(patches)
        batch, length, width = h.shape
        order = torch.rand(batch, length, device=h.device).argsort(1)
        restore = order.argsort(1)
        kept = h.gather(1, order[:, : length // 4].unsqueeze(-1).expand(-1, -1, width))
        whole = torch.cat([self.layer(kept), self.mask.expand(batch, length - length // 4, -1)], 1)
        whole = whole.gather(1, restore.unsqueeze(-1).expand(-1, -1, width))
        return (self.head(whole) - patches).square().mean()


def mae(batch: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    return Mae(), (torch.randn(batch, 16, 12),)


class Dit(nn.Module):
    """Draws times, noise and labels that are dropped; conditions by adaptive norms (arXiv 2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.labels, self.time = nn.Linear(16, WIDTH), nn.Embedding(11, WIDTH), nn.Linear(16, WIDTH)
        self.shift = nn.Linear(WIDTH, 2 * WIDTH)
        self.layer, self.head = Layer(0.0), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.rand(x.shape[0], device=x.device, dtype=x.dtype)
        noise = torch.randn_like(x)
        mixed = (1 - t)[:, None, None] * x + t[:, None, None] * noise
        if self.training:
            y = torch.where(torch.rand(y.shape[0], device=y.device) < 0.1, 10, y)
        phases = t[:, None] * torch.arange(1, 9, device=t.device, dtype=t.dtype)
        condition = self.labels(y) + self.time(torch.cat([phases.sin(), phases.cos()], 1))
        scale, shift = self.shift(F.silu(condition))[:, None].chunk(2, -1)
        return (self.head(self.layer(self.embed(mixed) * (1 + scale) + shift)) - (noise - x)).square().mean()


def dit(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Dit(), {"x": torch.randn(batch, 4, 16), "y": torch.randint(10, (batch,))}


class Swin(nn.Module):
    """Attention in windows, with drop path and attention dropout; the batch of the attention is that of the windows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(12, WIDTH), nn.ModuleList(Layer(0.1, 0.2) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = h.roll(2, 1) if number else h
            h = layer(h.unflatten(1, (-1, 4)).flatten(0, 1)).unflatten(0, (x.shape[0], -1)).flatten(1, 2)
        return F.cross_entropy(self.head(h.mean(1)), target)


def swin(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return Swin(), {"x": torch.randn(batch, 16, 12), "target": torch.randint(10, (batch,))}


class DeepLab(nn.Module):
    """Batch norm beside dropout; a dictionary without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.branches = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=d, dilation=d, bias=False) for d in (1, 2))
        self.join = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        h = self.head(self.join(torch.cat([branch(h) for branch in self.branches], 1)))
        return {"out": F.interpolate(h, scale_factor=2.0, mode="nearest")}


def deeplab(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return DeepLab(), {"x": _images(batch)["x"]}


@dataclass
class Forecast:
    """What `PatchTst` returns."""

    loss: Tensor
    prediction: Tensor
    hidden: Any = None


class PatchTst(nn.Module):
    """A time series in patches; batch norm instead of layer norm, dropout, a dataclass as the result (arXiv 2211.14730)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.norm = nn.Linear(4, WIDTH), Attention(0.2), nn.BatchNorm1d(WIDTH)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH * 8, 6)

    def forward(self, past: Tensor, future: Tensor) -> Forecast:
        mean, deviation = past.mean(-1, keepdim=True), past.std(-1, keepdim=True, unbiased=False) + 1e-5
        patches = self.embed(((past - mean) / deviation).unfold(-1, 4, 4)).flatten(0, 1)
        h = patches + self.drop(self.attention(patches))
        h = self.norm(h.transpose(1, 2)).transpose(1, 2)
        prediction = self.head(self.drop(h).flatten(1)).unflatten(0, past.shape[:2]) * deviation + mean
        return Forecast((prediction - future).abs().mean(), prediction)


def patchtst(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return PatchTst(), {"past": torch.randn(batch, 3, 32), "future": torch.randn(batch, 3, 6)}


class MixedDtypes(nn.Module):
    """Casts to float32 itself, meets its own parameters there, and has parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 64), nn.LayerNorm(64)
        self.down = nn.Linear(64, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x.float())).to(torch.float32)
        return self.down(h.to(self.down.weight.dtype)).square().mean() + torch.zeros(1).sum()


def mixed(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    return MixedDtypes(), {"x": torch.randn(batch, WIDTH)}


FACTORIES = {
    "convnext": convnext, "nanogpt": nanogpt, "vae": vae, "mae": mae, "dit": dit, "swin": swin, "deeplab": deeplab,
    "patchtst": patchtst, "mixed": mixed,
}  # fmt: skip
