"""Operations of several results that are taken apart: ``torch.gradient``, and deviations with their means."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import full_gradients
from torch import Tensor, nn

import autopar


def differences(x: Tensor) -> Tensor:
    places = torch.arange(6, dtype=x.dtype) ** 2
    parts = [
        *torch.gradient(x), *torch.gradient(x, dim=1, edge_order=2), *torch.gradient(x, spacing=0.5, dim=-1),
        *torch.gradient(x, spacing=(2.0, 0.5), dim=(1, 2)), *torch.gradient(x, spacing=(places,), dim=1),
    ]  # fmt: skip
    return torch.stack(parts).square().mean()


def statistics(x: Tensor) -> Tensor:
    parts = [
        *torch.std_mean(x, -1, keepdim=True), *torch.std_mean(x), *torch.var_mean(x, 0, unbiased=False),
        *torch.var_mean(x, (0, 2), correction=2, keepdim=True),
    ]  # fmt: skip
    return sum(part + x for part in parts).square().mean()  # type: ignore[union-attr]


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 8).double(), nn.Linear(8, 4).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.last(self.first(x).relu()))


def train_on_ranks(function: Callable[[Tensor], Tensor], degrees: str) -> None:
    torch.manual_seed(0)
    plain, x = Net(function), torch.randn(8, 6, 4, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (x,), force=degrees, cache=False, proof=True)
    for batch in (x, x[:6]):
        loss, expected = parallel(batch), plain(batch)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        loss.backward()
        expected.backward()
    torch.testing.assert_close(full_gradients(parallel), full_gradients(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("degrees", ["dp=2,zero=3", "dp=1,tp=2"])
@pytest.mark.parametrize("function", [differences, statistics])
def test_equals_one_process(ranks: RankPool, function: Callable[[Tensor], Tensor], degrees: str) -> None:
    ranks.run(train_on_ranks, function, degrees, world=2)
