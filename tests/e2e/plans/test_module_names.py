"""Modules whose names are no identifiers, as keys of nn.ModuleDict are: tasks, node types, languages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

KEYS = ("user-id", "text encoder", "名前", "été", '"quoted"', "{i}", "a/b", "class", "s")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(8, 8) for key in KEYS})
        self.été = nn.Linear(8, 8)
        self.ins = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleDict({key: nn.ModuleDict({key: nn.Linear(8, 4)}) for key in KEYS[:3]})
        self.register_parameter("scale-of", nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (*self.layers.values(), self.été, *self.ins):
            x = x + torch.tanh(layer(x) * getattr(self, "scale-of"))
        return sum((F.cross_entropy(self.heads[key][key](x), y) for key in KEYS[:3]), torch.zeros(()))


def train(force: str) -> None:
    torch.manual_seed(0)
    plain = Named().double()
    batch = {"x": torch.randn(8, 8).double(), "y": torch.arange(8) % 4}
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", batch, force=force, cache=False, proof=True)
    assert list(parallel.state_dict()) == list(plain.state_dict())
    for model in (plain, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
    same_gradients(parallel, plain)
    for name, value in parallel.full_state().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("force", ["pp=2,dp=1", "dp=2,zero=3", "tp=2,dp=1"])
def test_equal_one_process(ranks: RankPool, force: str) -> None:
    ranks.run(train, force, world=2)
