"""Models that define `train` themselves: detectors, whose batch norms stay in evaluation, and adapters that are merged there."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.harness.comparison import same_gradients, same_state
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> Detector:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.first(x)).relu())).square().mean()


class Merged(nn.Linear):
    """As loralib: the product of evaluation is one, of weights that `train` changes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.down, self.up, self.merged = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2)), False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up.data @ self.down.data) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Merged(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()).square().mean()


def in_turns(kind: type[nn.Module], degrees: str) -> tuple[nn.Module, Any, list[Tensor]]:
    """A model, plain and parallel, after training, evaluation and training, alike in each; and their last losses."""
    torch.manual_seed(0)
    plain = kind().double().train()
    x = torch.randn(8, 8, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (x,), force=degrees, cache=False)
    for mode in (True, False, True):
        losses = [model.train(mode)(x) for model in (plain, parallel)]
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-9, atol=1e-11)
        assert all(parallel.get_submodule(name).training == each.training for name, each in plain.named_modules())
    return plain, parallel, losses


def evaluate_merged(degrees: str) -> None:
    in_turns(Adapted, degrees)


def train_and_evaluate(degrees: str) -> None:
    plain, parallel, losses = in_turns(Detector, degrees)
    assert parallel.norm.training and not parallel.frozen.training
    for loss in losses:
        loss.backward()
    same_gradients(parallel, plain)
    same_state(parallel, plain)


def test_train_after_an_evaluation(ranks: RankPool) -> None:
    ranks.run(train_and_evaluate, "dp=2,zero=0", world=2, timeout=120)


def test_what_else_it_changes_is_not_done_by_halves(ranks: RankPool) -> None:
    ranks.run(evaluate_merged, "dp=2,zero=0", world=2, timeout=120)
