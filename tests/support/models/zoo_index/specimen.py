"""One model of a package: where it comes from, how it is made, and one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Callable[[int], dict[str, Tensor]]
Loss = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class IndexSpecimen:
    """`module` is what must be importable, `kind` the field, `paper` its arXiv number or venue; `batch` makes a global batch."""

    module: str
    kind: str
    paper: str
    build: Callable[[], nn.Module]
    batch: Batch


class Fitted(nn.Module):
    """A model of a package as training scripts use it: a loss of its result on `x` and of targets `y`."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


class FittedPair(Fitted):
    """Of a model with two inputs."""

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(self.net(x, z), y)


def words(out: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of the last dimension, at each position."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def first(loss: Loss) -> Loss:
    """Of a model that returns its result first in a tuple."""
    return lambda out, y: loss(out[0], y)


def images(*size: int, classes: int = 8) -> Batch:
    return lambda b: {"x": torch.randn(b, *size), "y": torch.randint(0, classes, (b,))}


def masks(*size: int, classes: int = 4) -> Batch:
    return lambda b: {"x": torch.randn(b, *size), "y": torch.randint(0, classes, (b, *size[1:]))}


def regression(size: tuple[int, ...], target: tuple[int, ...]) -> Batch:
    return lambda b: {"x": torch.randn(b, *size), "y": torch.randn(b, *target)}


def tokens(length: int = 16, count: int = 32) -> Batch:
    return lambda b: {name: torch.randint(0, count, (b, length)) for name in ("x", "y")}


def clicks(fields: int = 3, count: int = 10) -> Batch:
    return lambda b: {"x": torch.randint(0, count, (b, fields)), "y": torch.rand(b)}


def classes(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    """With cross entropy."""
    return lambda: Fitted(build(), F.cross_entropy)


def squares(build: Callable[[], Any]) -> Callable[[], nn.Module]:
    """With the mean squared error."""
    return lambda: Fitted(build(), F.mse_loss)
