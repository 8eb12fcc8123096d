"""``F.ctc_loss`` in each of its forms is one operation, equal to torch's; targets of unknown number are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

BATCH, STEPS, CLASSES, LABELS = 4, 9, 6, 3


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Linear(5, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.inner(x).log_softmax(-1).transpose(0, 1), labels)


def padded(scores: Tensor, labels: Tensor) -> Tensor:
    return F.ctc_loss(scores, labels.clamp_min(1), torch.full((labels.shape[0],), STEPS), (labels > 0).sum(-1).clamp_min(1))


def of_module(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = (STEPS,) * BATCH, (LABELS,) * BATCH
    return nn.CTCLoss(blank=0, reduction="sum")(scores, labels.clamp_min(1), *lengths)


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    lengths = torch.full((labels.shape[0],), STEPS)
    return F.ctc_loss(scores, labels.masked_select(mask), lengths, mask.sum(-1), blank=0, zero_infinity=True)


def each(scores: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    lengths = torch.full((labels.shape[0],), STEPS)
    return F.ctc_loss(scores, labels[mask], lengths, mask.sum(dim=1), reduction="none").square().sum()


def example() -> tuple[Tensor, Tensor]:
    labels = torch.tensor([[1, 2, 3], [2, 2, -100], [-100, 4, 5], [5, -100, -100]])
    return torch.randn(BATCH, STEPS, 5, dtype=torch.float64), labels


@pytest.mark.parametrize("loss", (padded, of_module, selected, each))
def test_equals_eager(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, (x, labels) = Net(loss).double(), example()
    graph = capture(model, (x, labels))
    assert "ap.ctc_losses" in [node.op for block in graph.blocks for node in block.nodes]
    check_captured(graph, model, {"x": x, "labels": labels}, loss_rtol=1e-9, rtol=1e-7, atol=1e-9)


def one_after_the_other(scores: Tensor, labels: Tensor) -> Tensor:
    mask = labels != -100
    return F.ctc_loss(scores, labels[mask], torch.full((BATCH,), STEPS), (labels > 0).sum(-1))


def test_targets_of_unknown_number_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_ctc.py:\d+: ctc_loss .* pass targets as \(batch, length\), padded"):
        capture(Net(one_after_the_other).double(), example())
