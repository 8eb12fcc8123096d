"""A model whose modules, tensors and methods are called like attributes of the parallel model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Named(nn.Module):
    """With a module, a parameter, a buffer, an attribute and a method of such names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state, self.compiler = nn.Parameter(torch.ones(8)), 2.0
        self.register_buffer("calls", torch.full((8,), 3.0))

    def load(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return (self.memory(self.first(x)) * self.state * self.calls * self.compiler).square().mean()  # type: ignore[operator, no-any-return]


def reach(options: str) -> None:
    """On a rank: parallelize warns, and torch's own ways reach what is hidden."""
    model, x = Named(), torch.ones(4, 8)
    parallel: Any = autopar.parallelize(copy.deepcopy(model), f"local:{dist.get_world_size()}", (x,), force=options, cache=False)
    assert isinstance(parallel.get_submodule("memory"), nn.Linear)
    assert parallel.get_parameter("memory.weight").shape == (8, 8)
    assert parallel.get_parameter("state").shape == parallel.get_buffer("calls").shape == (8,)
    for each in (model, parallel):
        each.get_submodule("memory").requires_grad_(False)
        each(x).backward()
    assert parallel.full_gradients().keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    with pytest.raises(AttributeError):
        parallel.get_submodule("memory.nothing")


def reach_or_warn(options: str) -> None:
    if dist.get_rank():
        reach(options)
        return
    with pytest.warns(UserWarning, match="memory, state, calls, compiler, load of Named: parallel.memory is another thing"):
        reach(options)


@pytest.mark.parametrize("options", ["dp=2,tp=1,zero=3,pp=1", "pp=2,dp=1,tp=1"])
def test_hidden_names_are_told_and_reached(ranks: RankPool, options: str) -> None:
    ranks.run(reach_or_warn, options, world=2)
