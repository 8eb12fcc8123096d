"""Compiled steps of optimizers give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import nn

import autopar

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw_each": partial(torch.optim.AdamW, lr=0.01, foreach=False),
}


class Squares(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6), nn.Tanh())]
    return Squares(*layers).double(), torch.randn(8, 6).double()


def compile_step(optimizer: str, force: str) -> None:
    torch._dynamo.reset()
    plain, x = model_and_batch()
    parallel = autopar.parallelize(plain, "local:2", (x,), force=force, cache=False)
    reference, _ = model_and_batch()
    for model in (parallel, reference):
        made = OPTIMIZERS[optimizer](model.parameters())
        step: Any = torch.compile(made.step, backend="aot_eager")  # AdamW counts steps in float32 where it is compiled
        for _ in range(3):
            model(x).backward()
            step()
            made.zero_grad()
    torch.testing.assert_close(dict(parallel.full_state()), dict(reference.state_dict()), rtol=1e-9, atol=1e-12)


def compile_clipping(force: str) -> None:
    torch._dynamo.reset()
    model, x = model_and_batch()
    parallel = autopar.parallelize(model, "local:2", (x,), force=force, cache=False)
    parallel(x).backward()
    clip = torch.compile(lambda: nn.utils.clip_grad_norm_(parallel.parameters(), 0.1), backend="aot_eager")
    with pytest.raises(Exception, match="outside of the compiled function"):
        clip()


@pytest.mark.parametrize("force", ["dp=2,zero=3", "tp=2,dp=1", "pp=2,dp=1"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_steps(optimizer: str, force: str, ranks: RankPool) -> None:
    ranks.run(compile_step, optimizer, force, world=2)


@pytest.mark.parametrize("force", ["dp=2,zero=3", "pp=2,dp=1"])
def test_norms_are_refused(force: str, ranks: RankPool) -> None:
    """Traced, they would be those of one stage of a pipeline."""
    ranks.run(compile_clipping, force, world=2)
