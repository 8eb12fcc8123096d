"""What a pipeline refuses names a remedy that works: the loss among the outputs, or one micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


class Weighted(nn.Module):
    """A learned uncertainty weight (Kendall), whose logarithm is added once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.log = nn.Linear(6, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.head(self.body(x)), y)
        return torch.exp(-self.log[0]) * loss + self.log[0]


class Parts(Weighted):
    """No name in its code says that the first result is the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.head(self.body(x))
        a, b = nn.functional.cross_entropy(scores, y), scores.abs().mean()
        return a + b, {"ce": a.detach(), "size": b.detach()}


def plan_of(model: nn.Module, force: str, **options: Any) -> Any:
    return autopar.plan(model, "local:2", (torch.randn(8, 6), torch.arange(8) % 4), force=force, **options)


def test_a_term_of_weights_takes_one_micro_batch() -> None:
    with pytest.raises(AutoparError, match=r"adds aten\.select\.int.* to the sum of the whole batch.*pp=1.*micro=8\)"):
        plan_of(Weighted(), "pp=2,micro=2")
    assert plan_of(Weighted(), "pp=2,micro=8").candidate.micro_batches == 1


def test_a_loss_among_parts_is_named_as_an_output() -> None:
    with pytest.raises(AutoparError, match=r'ask for outputs=\("0:loss",\)'):
        plan_of(Parts(), "pp=2")
    assert plan_of(Parts(), "pp=2", outputs=("0:loss",)).candidate.pipeline.stages == 2


def test_the_operation_that_reads_the_whole_batch_is_named() -> None:
    model = nn.Linear(6, 4)
    example = (torch.randn(8, 6), torch.arange(8) % 4)
    with pytest.raises(AutoparError, match=r"needs aten\.linear .*, which aten\.multi_margin_loss reads, of the whole batch"):
        autopar.plan(model, "local:2", example, force="dp=2,micro=2", loss_fn=nn.MultiMarginLoss())
