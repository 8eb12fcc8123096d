"""Methods of the model's class, called on the parallel model, return and do what they do in one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autopar

DONE: list[int] = []


class Model(nn.Module):
    """With methods that return plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x))).square().mean()  # type: ignore[no-any-return]

    def clip(self) -> float:
        return float(clip_grad_norm_(self.parameters(), 0.1))

    def has_norm(self) -> str:
        try:
            return f"{float(clip_grad_norm_(self.parameters(), 1e9)) > 0}"
        except RuntimeError:
            return "no norm"

    def has_gradient(self) -> bool:
        return any(each.grad is not None for each in self.parameters())

    def count(self) -> int:
        return sum(each.data.numel() for each in self.parameters())

    def count_trained(self) -> int:
        return sum(each.numel() for each in self.parameters() if each.requires_grad)

    @property
    def size(self) -> int:
        return self.count()

    def modes(self) -> list[bool]:
        return [each.training for each in self.modules()]

    def evaluate_first(self) -> int:
        self.first.eval()
        return 1

    def note(self) -> None:
        DONE.append(random.randrange(100))

    def note_and_draw(self) -> float:
        return float(self.first.bias.grad is not None) + float(torch.rand(()))

    def device(self) -> str:
        return next(self.parameters()).device.type


class Unused(Model):
    """With a parameter that its forward does not use, which the parallel model lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


def answers(model: Any) -> list[Any]:
    """Ask in a step, between changes of modes and of parameters that train."""
    for generator in (torch.manual_seed, random.seed):
        generator(0)
    model(torch.ones(4, 8, dtype=torch.float64)).backward()
    model.note()
    out = [model.has_gradient(), model.count(), model.size, model.note_and_draw()]
    out += [len(DONE), random.random(), float(torch.rand(1))]
    out += [model.clip(), model.clip(), torch.is_grad_enabled(), model.device(), model.modes()]
    out += [model.evaluate_first(), model.modes(), model.eval().modes()]
    model.first.requires_grad_(False)
    out += [model.count_trained(), model.has_norm()]
    DONE.clear()
    return out


def compare(options: str) -> None:
    """On a rank: each model answers as in one process."""
    for kind in (Model, Unused):
        torch.manual_seed(1)
        plain, x = kind().double(), torch.ones(4, 8, dtype=torch.float64)
        parallel = autopar.parallelize(copy.deepcopy(plain), f"local:{dist.get_world_size()}", (x,), force=options, cache=False)
        found, expected = answers(parallel), answers(plain)
        if "pp=2" in options:  # a stage knows the gradients of its own parameters
            del found[3], expected[3]
        for one, other in zip(found, expected, strict=True):
            assert one == (pytest.approx(other) if isinstance(other, float) else other), (kind, options, found, expected)


@pytest.mark.parametrize("options", ["dp=2,tp=1,zero=3,pp=1", "pp=2,dp=1,tp=1"])
def test_methods_answer_as_in_one_process(ranks: RankPool, options: str) -> None:
    """Those that read gradients, values or modes were answered by a model without data, and those without a result ran twice."""
    ranks.run(compare, options, world=2)
