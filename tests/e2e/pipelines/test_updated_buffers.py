"""Layers that read buffers which their forward updates, as spectral norm does: recomputed but for those reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients, same_state
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import autopar


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(spectral_norm(nn.Conv1d(2, 2, 3, padding=1)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x.unflatten(1, (2, 4))
        for layer in self.layers:
            hidden = hidden + F.leaky_relu(layer(hidden))
        return F.cross_entropy(self.head(hidden.flatten(1)), y)


def train(force: str) -> str:
    torch.manual_seed(0)
    plain = Spectral().double()
    batch = {"x": torch.randn(8, 8).double(), "y": torch.arange(8) % 4}
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", batch, force=force, cache=False)
    for _ in range(2):
        for model in (plain, parallel):
            model(**batch).backward()
        same_gradients(parallel, plain)
    same_state(parallel, plain)
    return str(parallel.plan.candidate.block("ParametrizedConv1d2").recompute_nodes)  # of the layers that repeat


@pytest.mark.parametrize(
    "force", ["pp=2,dp=1,micro=8", "tp=1,pp=1,zero=0,micro_batches=1,recompute=full,zero_group=0,sequence_parallel=0"]
)
def test_equals_one_process(ranks: RankPool, force: str) -> None:
    for recomputed in ranks.run(train, force, world=2):
        assert "recompute=full" not in force or ("'mv'" in recomputed and "clone" not in recomputed)
