"""The sum of class weights over the labels is known before the first micro-batch: they are a buffer, which no program writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.program.proof import prove_program


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 5)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.body(x)))
        smooth = nn.functional.cross_entropy(scores, y, weight=self.weight, label_smoothing=0.1)
        return smooth + nn.functional.cross_entropy(scores, y, weight=self.weight, ignore_index=2)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(0, 5, (8,), generator=generator)}


def losses(model: Any, other_weights: Tensor) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        if step == 1:
            model.weight.copy_(other_weights)
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    with torch.no_grad():
        found.append(model(**batch(3)))
    return found


def weighted(plan: str) -> None:
    torch.manual_seed(0)
    plain = Weighted().double()
    plain_batch = {name: each.double() if each.is_floating_point() else each for name, each in batch(0).items()}
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", plain_batch, force=plan, cache=False)
    assert parallel.program.micro_batches > 1 and parallel.program.totals
    torch.set_default_dtype(torch.float64)
    try:
        found, expected = (losses(model, torch.arange(1.0, 6.0)) for model in (parallel, plain))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=1,pp=2,micro=4"])
def test_weights_of_classes(ranks: RankPool, plan: str) -> None:
    ranks.run(weighted, plan, world=2)


@pytest.mark.parametrize("plan", ["dp=2,micro=2", "dp=1,pp=2,micro=4"])
def test_their_programs_are_proven(plan: str) -> None:
    found = autopar.plan(Weighted(), "local:2", batch(0), force=plan)
    certificate = prove_program(found)
    assert certificate.holds, certificate.line()


class Spectral(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


def test_a_buffer_that_is_updated_once_a_forward() -> None:
    for force in ("pp=2", "dp=2,micro=2"):
        with pytest.raises(AutoparError, match=r"updates the buffer head\w*_u once a forward, which would be once a micro-batch"):
            autopar.plan(Spectral(), "local:2", batch(0), force=force)
