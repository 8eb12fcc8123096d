"""Small nets on images that are large enough to be cut along a dimension of space: one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


def double(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """arXiv 1505.04597: maximum pooling down, transposed convolutions up, skips, a class for each pixel."""

    def __init__(self, width: int = 4, depth: int = 2, classes: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.first, self.pool, self.out = double(3, width), nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)
        self.down = nn.ModuleList(double(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in pairs)
        self.join = nn.ModuleList(double(2 * narrow, narrow) for narrow, _ in pairs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skips, x = [], self.first(x)
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return F.cross_entropy(self.out(x), y)


class Segmentation(nn.Module):
    """A strided stem and maximum pool, dilated and depthwise convolutions, the mean of the image beside them, and bilinear
    interpolation to the size of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.SiLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.wide = nn.Conv2d(8, 8, 3, padding="same", dilation=4)
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.GroupNorm(2, 8), nn.GELU())
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1))
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = torch.cat([self.wide(x), self.depthwise(x) * self.mean(x).sigmoid()], 1)
        return F.cross_entropy(F.interpolate(self.out(x), scale_factor=4.0, mode="bilinear", align_corners=False), y)


class Volume(nn.Module):
    """Three dimensions: group and instance norms, a strided convolution and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down = nn.Sequential(nn.Conv3d(4, 8, 3, 2, 1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose3d(8, 4, 4, 2, 1)
        self.out = nn.Conv3d(8, 1, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.first(x)
        return F.mse_loss(self.out(torch.cat([a, self.up(self.down(a))], 1)), y)


class Wave(nn.Module):
    """One dimension: dilated grouped convolutions, an average pool, linear interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 8, 4, 2)
        self.body = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=rate, dilation=rate, groups=4) for rate in (1, 2, 16))
        self.pool, self.out = nn.AvgPool1d(3, 1, 1), nn.ConvTranspose1d(8, 1, 4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.body:
            x = x + torch.tanh(self.pool(each(x)))
        x = F.interpolate(F.avg_pool1d(x, 2), scale_factor=2.0, mode="linear")
        return F.l1_loss(self.out(x), y)


def _labelled(*size: int) -> Batch:
    return {"x": torch.randn(2, 3, *size), "y": torch.randint(0, 3, (2, *size))}


IMAGES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "unet": (lambda: UNet(depth=1), lambda: _labelled(64, 64)),
    "deep unet": (UNet, lambda: _labelled(128, 128)),
    "segmentation": (Segmentation, lambda: _labelled(256, 320)),
    "volume": (Volume, lambda: {"x": torch.randn(2, 1, 32, 16, 16), "y": torch.randn(2, 1, 32, 16, 16)}),
    "wave": (Wave, lambda: {"x": torch.randn(2, 1, 32768), "y": torch.randn(2, 1, 32768)}),
}


def case(name: str) -> tuple[nn.Module, Batch]:
    """The model in float64 and a batch of two."""
    torch.manual_seed(0)
    model, batch = IMAGES[name][0]().double(), IMAGES[name][1]()
    return model, {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
