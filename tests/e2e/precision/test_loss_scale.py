"""fp16 in micro-batches and pipelines: gradients that float16 has no numbers for, but for the scale of the loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.runtime.state.loss_scale import USUAL, LossScale


class Small(nn.Module):
    """Its gradients are below the least float16 number (6e-8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean() * 1e-6


def gradients(model: Any, scale: float, steps: int) -> dict[str, Tensor]:
    """Of the last step."""
    scaler, x = torch.amp.GradScaler("cpu", init_scale=scale), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return dict(model.full_gradients()) if hasattr(model, "full_gradients") else {n: p.grad for n, p in model.named_parameters()}


def script(force: str) -> None:
    expected = gradients(Small(), 1.0, 1)
    for scale, steps in ((2.0**16, 1), (2.0**12, 3)):
        with warnings.catch_warnings(action="ignore"):
            parallel = autopar.parallelize(
                Small(), "local:2", (torch.randn(8, 16),), precision="fp16", force=force, cache=False
            )  # fmt: skip
        found = gradients(parallel, scale, steps)
        assert parallel.state.loss_scale.next == scale and parallel.state.loss_scale.used == (USUAL if steps == 1 else scale)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < 0.03 * gradient.norm(), (force, name, found[name], gradient)


@pytest.mark.parametrize("force", ["dp=2,micro=1", "pp=2"])
def test_small_gradients_survive(force: str, ranks: RankPool) -> None:
    ranks.run(script, force, world=2)


def test_the_scale_follows_the_losses_gradient() -> None:
    scale, loss = LossScale("float16"), torch.tensor(1.0)
    scale.begin("float32")
    assert scale.gradient(loss) == USUAL and scale.factor(torch.tensor(64.0), scale.used) == 64.0 / USUAL
    scale.begin("float32")
    assert scale.used == 64.0 and scale.factor(torch.tensor(torch.inf), 64.0).isinf() and scale.next == 64.0
    other = LossScale("bfloat16")
    other.begin("float32")
    assert other.gradient(loss) is None and other.factor(torch.tensor(3.0), other.used) == 3.0
