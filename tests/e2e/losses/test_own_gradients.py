"""Gradients that a model makes itself, by custom ``autograd.Function``s and ``torch.func``, as in one process on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.func import grad, grad_and_value
from torch.nn.functional import linear

import autopar
from autopar.errors import CaptureError


class Picks(torch.autograd.Function):
    """Its backward runs without gradients, asks, writes the gradient, and reads a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x, weight if weight.requires_grad else 0 * weight)
        ctx.module = module
        return x.tanh() * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        mask = torch.zeros_like(g).scatter_(-1, x.topk(4, -1).indices, 1.0)
        with torch.no_grad():
            picked = g * mask * weight
        return (g.detach() + picked).mul_(0.5) @ ctx.module.weight, (g * x.tanh()).sum(0), None


class Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + 0.01 * ctx.saved_tensors[0].sign()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 12)
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = Picks.apply(self.first(x), self.scale, self.middle)
        return (self.last(self.middle(h)) - y).square().mean()


class Step(Model):
    """An inner step, with a gradient that no gradient goes through."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, weight = self.first(x).tanh(), self.last.weight
        loss = lambda w: (linear(h, w) - y).square().mean()  # noqa: E731
        with torch.no_grad():
            fixed = grad(loss)(weight)
        gradient, value = grad_and_value(loss)(weight)
        return (linear(h, weight - 0.1 * gradient - 0.1 * fixed) - y).square().mean() + value


class Punishes(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(Penalty.apply(self.first(x))) - y).square().mean()


def batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, 12, generator=generator, dtype=torch.float64) for name in "xy"}


def trains(name: str, force: str) -> None:
    """Two sizes with gradients, and a further one without, whose program is captured there."""
    torch.manual_seed(0)
    plain = globals()[name]().double()
    parallel = autopar.parallelize(plain, "local:2", batch(8), force=force, cache=False)
    for size in (8, 6):
        losses = [model(**batch(size)) for model in (parallel, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-9)
        for model, loss in zip((parallel, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        same_gradients(parallel, plain)
    with torch.no_grad():
        assert parallel(**batch(3)).item() == pytest.approx(plain(**batch(3)).item(), rel=1e-9)


def refuses(force: str) -> None:
    with pytest.raises(CaptureError, match=r"test_own_gradients.py:\d+: .*Penalty.*into the loss"):
        autopar.parallelize(Punishes().double(), "local:2", batch(8), force=force, cache=False)


@pytest.mark.parametrize("force", ["dp=2,tp=1,zero=3", "tp=2,dp=1"])
@pytest.mark.parametrize("name", ["Model", "Step"])
def test_equals_one_process(ranks: RankPool, name: str, force: str) -> None:
    """Parts of the gradient were lost, or others had one, and inner gradients under ``no_grad`` were zeros, without a word."""
    ranks.run(f"{__file__}:trains", name, force, world=2)


def test_a_penalty_in_a_backward_is_refused(ranks: RankPool) -> None:
    """It was lost, without a word."""
    ranks.run(f"{__file__}:refuses", "tp=2,dp=1", world=2)
