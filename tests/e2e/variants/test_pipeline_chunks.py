"""Calls of a pipeline whose last stage computes the loss alone: other batches, and weights that train later."""

from __future__ import annotations

from typing import Any

import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


def batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 6, generator=generator, dtype=torch.float64), "y": torch.arange(size) % 4}


def steps_of_all_kinds() -> None:
    torch.manual_seed(0)
    plain: Any = Classifier().double()
    plain.body.requires_grad_(False)
    parallel: Any = autopar.parallelize(plain, "local:2", batch(8), force="pp=2", cache=False)
    last = parallel.plan.candidate.pipeline.cuts[-1]
    assert not any(call.parameters for call in parallel.plan.graph.calls[last:])
    plain = Classifier().double()
    plain.load_state_dict(parallel.full_state())
    for unfrozen, size in ((False, 6), (True, 8)):
        for model in (parallel, plain):
            model.body.requires_grad_(unfrozen)
            model.zero_grad()
            model(**batch(size)).backward()
        same_gradients(parallel, plain)


def test_a_stage_with_the_loss_alone(ranks: RankPool) -> None:
    ranks.run(steps_of_all_kinds, world=2)
