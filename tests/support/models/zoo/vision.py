"""Convolutional nets, detection, segmentation, siamese nets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm


class ConvNextBlock(nn.Module):
    """arXiv 2201.03545, with stochastic depth."""

    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-1 * torch.ones(dim))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(F.gelu(self.up(self.norm(y))))
        y = y.permute(0, 3, 1, 2)
        if self.drop and self.training:
            keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop)
            y = y * keep / (1 - self.drop)
        return x + y


class ConvNext(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.Sequential(ConvNextBlock(8, drop), ConvNextBlock(8, drop))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(x)).mean([-2, -1])), y)


class DoubleConvolution(nn.Sequential):
    def __init__(self, into: int, out: int) -> None:
        layers = []
        for first in (into, out):
            layers += [nn.Conv2d(first, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet(nn.Module):
    """arXiv 1505.04597, as in milesial's code: the skip is padded where sizes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.bottom = DoubleConvolution(3, 8), DoubleConvolution(8, 16), DoubleConvolution(16, 16)
        self.pool = nn.MaxPool2d(2)
        self.up1, self.conv1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), DoubleConvolution(32, 8)
        self.up2, self.conv2 = nn.ConvTranspose2d(8, 8, 2, 2), DoubleConvolution(16, 8)
        self.out = nn.Conv2d(8, 4, 1)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return torch.cat([skip, x], dim=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.first(x)
        b = self.down(self.pool(a))
        c = self.bottom(self.pool(b))
        d = self.conv1(self.join(self.up1(c), b))
        return F.cross_entropy(self.out(self.conv2(self.join(self.up2(d), a))), y)


class DeepLab(nn.Module):
    """arXiv 1706.05587: atrous pyramid with an image-level branch, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=rate, dilation=rate, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            for rate in (1, 2, 3)
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(8, 4, 1))

    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        x = self.stem(image)
        size = x.shape[-2:]
        found = [branch(x) for branch in self.branches]
        found.append(F.interpolate(self.pooled(x), size=size, mode="bilinear", align_corners=False))
        x = self.project(torch.cat(found, dim=1))
        x = F.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(x, mask, ignore_index=255)


class Siamese(nn.Module):
    """Koch et al. 2015, with batch norm; the trunk is called twice. Contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 16)
        )

    def forward(self, one: Tensor, two: Tensor, same: Tensor) -> Tensor:
        distance = F.pairwise_distance(self.trunk(one), self.trunk(two))
        return (same * distance.pow(2) + (1 - same) * F.relu(1.0 - distance).pow(2)).mean()


class DetectionHead(nn.Module):
    """RetinaNet, arXiv 1708.02002: anchors made in forward, focal loss, smooth L1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(8, 2 * 4, 3, padding=1), nn.Conv2d(8, 2 * 4, 3, padding=1)

    def anchors(self, height: int, width: int, like: Tensor) -> Tensor:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centers = torch.stack((x, y, x, y), -1).to(like) * 4
        sizes = torch.tensor([[-2.0, -2.0, 2.0, 2.0], [-4.0, -4.0, 4.0, 4.0]]).to(like)
        return (centers[:, :, None] + sizes).reshape(-1, 4)

    def forward(self, image: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        x = self.body(image)
        logits = self.classes(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        deltas = self.boxes(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        found = deltas + self.anchors(x.shape[2], x.shape[3], x)
        wanted = F.one_hot(labels, 4).to(x.dtype)
        p = torch.sigmoid(logits)
        ce = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        p_t = p * wanted + (1 - p) * (1 - wanted)
        return (ce * (1 - p_t) ** 2).sum() / x.shape[0] + F.smooth_l1_loss(found, boxes)


class WeightNormNet(nn.Module):
    """Old and new weight norm, spectral norm left out; instance norm; `LazyLinear`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = weight_norm(nn.Conv1d(3, 8, 3, padding=1))
        self.two = parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))
        self.norm = nn.InstanceNorm1d(8, affine=True)
        self.out = nn.LazyLinear(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(F.elu(self.two(F.elu(self.one(x)))))
        return F.nll_loss(F.log_softmax(self.out(x.flatten(1)), 1), y)


class SpatialTransformer(nn.Module):
    """arXiv 1506.02025, as in torch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU())
        self.theta = nn.Sequential(nn.Linear(4 * 16, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.theta[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.conv, self.drop, self.out = nn.Conv2d(1, 4, 3), nn.Dropout2d(0.0), nn.Linear(4 * 36, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        theta = self.theta(self.where(x).view(-1, 4 * 16)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        x = self.drop(F.relu(self.conv(x)))
        return F.nll_loss(F.log_softmax(self.out(x.view(-1, 4 * 36)), dim=1), y)


class MobileNet(nn.Module):
    """arXiv 1905.02244 in small: inverted residual, squeeze and excitation, hard swish, a lambda over a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.up = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.deep = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16))
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
        self.down = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)
        self.gate = lambda x: x * F.hardsigmoid(self.squeeze(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down(self.gate(self.deep(self.up(x))))
        return F.cross_entropy(self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), y, label_smoothing=0.1)


class PrototypeNet(nn.Module):
    """arXiv 1703.05175: distances of queries to the prototypes by `torch.cdist`; class weights in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Parameter(torch.randn(4, 8))
        self.weights = torch.tensor([1.0, 2.0, 0.5, 1.0])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = -torch.cdist(self.encode(x), self.prototypes)
        return F.cross_entropy(scores, y, weight=self.weights.to(x))
