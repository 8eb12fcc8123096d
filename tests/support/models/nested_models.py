"""Models whose equal layers lie inside of other modules: stages of bottlenecks, attention blocks of a U-Net, shared layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """As in ResNet; the first of a stage changes width and stride."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.spread, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        plain = inputs == outputs and stride == 1
        self.shortcut = None if plain else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.reduce(x)))
        y = self.norm3(self.widen(self.relu(self.norm2(self.spread(y)))))
        return self.relu(y.add_(x if self.shortcut is None else self.shortcut(x)))


class Stage(nn.Module):
    def __init__(self, depth: int, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        rest = (Bottleneck(4 * width, width) for _ in range(depth - 1))
        self.layers = nn.Sequential(Bottleneck(inputs, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResNet(nn.Module):
    """``x[B, 3, 16, 16], target[B]``; stages are elements of a ModuleList, as in transformers."""

    def __init__(self, depths: Sequence[int], width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width * 2**number for number in range(len(depths))]
        inputs = [width, *(4 * each for each in widths)]
        self.stages = nn.ModuleList(
            Stage(depth, before, own, 1 + (number > 0))
            for number, (depth, before, own) in enumerate(zip(depths, inputs, widths, strict=False))
        )
        self.head = nn.Linear(4 * widths[-1], 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


class Layer(nn.Module):
    """A transformer layer of 4 heads; with `window` tokens of each window see each other, and `shift` moves the windows."""

    def __init__(self, width: int, window: int = 0, shift: int = 0) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        if self.window:
            y = torch.roll(y, -self.shift, 1) if self.shift else y
            windows = y.unflatten(1, (-1, self.window)).flatten(0, 1)
            y = self.attention(windows).unflatten(0, (x.shape[0], -1)).flatten(1, 2)
            y = torch.roll(y, self.shift, 1) if self.shift else y
        else:
            y = self.attention(y)
        x = x + y
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Merged(nn.Module):
    """A stage of windowed layers, every second one shifted by as much as its own index in a list of 4; then neighbours merge."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, 4, 2 * (index % 2)) for index in range(depth))
        self.merge = nn.Linear(2 * width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.merge(x.unflatten(1, (-1, 2)).flatten(2))


class Swin(nn.Module):
    """``x[B, 16, 8], target[B]``."""

    def __init__(self, depths: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Merged(depth, 8 * 2**number) for number, depth in enumerate(depths))
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8 * 2 ** len(depths), 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean(1)), target)


class Attention(nn.Module):
    """Transformer layers over the pixels of an image, as in the U-Nets of diffusion models."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.GroupNorm(2, width), nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        for layer in self.layers:
            y = layer(y)
        return x + self.leave(y).transpose(1, 2).unflatten(2, x.shape[2:])


class Part(nn.Module):
    """Convolutions and attention in turns; on the way up each convolution reads a skip connection too."""

    def __init__(self, inputs: int, width: int, depth: int, skips: bool) -> None:
        super().__init__()
        more = width if skips else 0
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(each + more, width, 3, padding=1), nn.SiLU()) for each in (inputs, width)
        )
        self.attentions = nn.ModuleList(Attention(width, depth) for _ in range(2))

    def forward(self, x: Tensor, skips: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        made = []
        for convolution, attention in zip(self.convolutions, self.attentions, strict=True):
            x = attention(convolution(torch.cat((x, skips.pop()), 1) if skips else x))
            made.append(x)
        return x, made


class UNet(nn.Module):
    """``x[B, 3, 4, 4], target[B, 3, 4, 4]``; the attention blocks of both ways have `depth` equal layers each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down = nn.ModuleList((Part(8, 8, depth, False),))
        self.up = nn.ModuleList((Part(8, 8, depth, True),))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, skips = self.down[0](self.stem(x), [])
        x, _ = self.up[0](x, skips)
        return F.mse_loss(self.out(x), target)


class Shared(nn.Module):
    """``x[B, 4, 8], target[B]``: one layer that is called `times` times, after an encoder that is called twice."""

    def __init__(self, times: int, depth: int = 3) -> None:
        super().__init__()
        self.times = times
        self.encoder = nn.Sequential(*(Layer(8) for _ in range(depth)))
        self.stem, self.layer, self.head = nn.Linear(8, 8), Layer(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.encoder(x) + self.encoder(x * 2)
        for _ in range(self.times):
            x = self.layer(x)
        return F.cross_entropy(self.head(x.mean(1)), target)


def nested_model(kind: str, depth: int) -> nn.Module:
    """``resnet``, ``swin``, ``unet`` or ``shared``, with `depth` layers where it has many."""
    made = {
        "resnet": lambda: ResNet((3, depth)),
        "swin": lambda: Swin((depth, 2)),
        "unet": lambda: UNet(depth),
        "shared": lambda: Shared(depth),
    }
    return made[kind]()


def nested_inputs(kind: str, batch: int = 4) -> dict[str, Tensor]:
    shape = {"resnet": (3, 16, 16), "swin": (16, 8), "unet": (3, 4, 4), "shared": (4, 8)}[kind]
    dtype = torch.get_default_dtype()
    x = torch.randn(batch, *shape, dtype=dtype)
    target = torch.randn(batch, *shape, dtype=dtype) if kind == "unet" else torch.randint(8, (batch,))
    return {"x": x, "target": target}
