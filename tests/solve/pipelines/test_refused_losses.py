"""What a pipeline refuses names a remedy that works: the loss among the outputs, or one micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


class Parts(nn.Module):
    """No name in its code says that the first result is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.head(self.body(x))
        a, b = nn.functional.cross_entropy(scores, y), scores.abs().mean()
        return a + b, {"ce": a.detach(), "size": b.detach()}


def plan_of(model: nn.Module, force: str, **options: Any) -> Any:
    return autopar.plan(model, "local:2", (torch.randn(8, 6), torch.arange(8) % 4), force=force, **options)


def test_a_loss_among_parts_is_named_as_an_output() -> None:
    with pytest.raises(AutoparError, match=r'ask for outputs=\("0:loss",\)'):
        plan_of(Parts(), "pp=2")
    assert plan_of(Parts(), "pp=2", outputs=("0:loss",)).candidate.pipeline.stages == 2


def test_the_operation_that_reads_the_whole_batch_is_named() -> None:
    model = nn.Linear(6, 4)
    example = (torch.randn(8, 6), torch.arange(8) % 4)
    with pytest.raises(AutoparError, match=r"needs aten\.linear .*, which aten\.multi_margin_loss reads, of the whole batch"):
        autopar.plan(model, "local:2", example, force="dp=2,micro=2", loss_fn=nn.MultiMarginLoss())
