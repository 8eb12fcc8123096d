"""Losses of picked positions, and statistics, are what torch computes; what looks like them and is another is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 7


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(5, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def of_mask(pick: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    return lambda scores, y: pick(scores, y, y != -100)


def under_no_grad(scores: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        target = scores[mask]
    return F.mse_loss(scores.square()[mask], target, reduction="sum")


def of_each(pick: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """A loss of those of all positions, and the mask."""
    return of_mask(lambda scores, y, m: pick(F.cross_entropy(scores.mT, y, reduction="none"), m))


LOSSES: dict[str, Loss] = {
    "the mean of picked losses": of_each(lambda each, m: each[m].mean()),
    "the sum over the count": of_each(lambda each, m: each[m].sum() / m.sum().clamp(min=1)),
    "the mean of picked rows": of_mask(lambda scores, y, m: torch.mean(scores.square()[m])),
    "a sum of counts": of_mask(lambda scores, y, m: scores.square().mean() * y[m].sum()),
    "the mask twice": lambda scores, y: F.cross_entropy(scores[y != -100], y[y != -100]),
    "label smoothing": of_mask(lambda scores, y, m: F.cross_entropy(scores[m], y[m], label_smoothing=0.1)),
    "weights": of_mask(lambda scores, y, m: F.cross_entropy(scores[m], y[m], weight=torch.arange(1.0, 8.0).double())),
    "others are infinite": of_mask(
        lambda scores, y, m: (lambda s: F.cross_entropy(s[m], y[m]))(scores + torch.where(m, 0.0, -torch.inf)[..., None])
    ),
    "sum": of_mask(lambda scores, y, m: F.cross_entropy(scores[m], y[m], reduction="sum")),
    "rows": lambda scores, y: (
        (lambda m: nn.CrossEntropyLoss()(scores.view(-1, CLASSES)[m], y.view(-1)[m]))(y.view(-1) != -100)
    ),
    "nll": of_mask(lambda scores, y, m: F.nll_loss(scores.log_softmax(-1)[m], y[m])),
    "squares": of_mask(lambda scores, y, m: F.mse_loss(scores[m], torch.ones_like(scores)[m])),
    "probabilities": of_mask(lambda scores, y, m: F.binary_cross_entropy(scores.sigmoid()[m], (scores > 0).double()[m])),
    "one number": of_mask(lambda scores, y, m: F.l1_loss(scores[..., 0][m], y.double()[m])),
    "targets without gradients": of_mask(under_no_grad),
    "covariance": lambda scores, y: torch.cov(scores[:, 0].T).square().sum(),
    "variance": lambda scores, y: scores[:, 0, 0].cov(correction=0).sum(),
    "correlation": lambda scores, y: scores[:, 0].T.corrcoef().square().sum(),
    "counts": lambda scores, y: F.cross_entropy(
        scores[:, 0], y[:, 0].clamp(min=0), weight=torch.bincount(y[:, 0].clamp(min=0), minlength=CLASSES).double() + 1
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_equals_torch(name: str) -> None:
    torch.manual_seed(0)
    model = Model(LOSSES[name]).double()
    x, y = torch.randn(4, 6, 5).double(), torch.randint(0, CLASSES, (4, 6))
    y = torch.where(torch.rand(4, 6) < 0.5, y, -100)
    expected = model(x, y)
    expected.backward()
    graph = capture(model, (x, y))
    assert graph.batch_is_symbolic
    loss, gradients = loss_and_gradients(graph, model.state_dict(), {"x": x, "y": y})
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-9, atol=1e-12)


def test_a_mean_of_halves_is_finite() -> None:
    graph = capture(Model(LOSSES["squares"]).half(), (torch.ones(4, 6, 5).half(), torch.ones(4, 6).long()))
    ops = [node.op for block in graph.blocks for node in block.nodes]
    assert "float32" in [node.outputs[0].dtype for block in graph.blocks for node in block.nodes if "sum" in node.op], ops


def random_masks(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores[(y > 3).bernoulli_(0.5)], y[(y > 3).bernoulli_(0.5)])


def written(scores: Tensor, y: Tensor) -> Tensor:
    mask = y != -100
    picked = scores[mask]
    mask &= y > 3
    return F.cross_entropy(picked, y[mask])


REFUSED: dict[str, Loss] = {
    "another mask": lambda scores, y: F.cross_entropy(scores[y > 3], y[y != -100]),
    "of other operands": lambda scores, y: F.cross_entropy(scores[(scores.abs() > 3).any(-1)], y[(scores.exp() > 3).any(-1)]),
    "each": of_mask(lambda scores, y, m: F.cross_entropy(scores[m], y[m], reduction="none").square().sum()),
    "a written mask": written,
    "two random masks": random_masks,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="depends on the data.*ignore_index"):
        capture(Model(REFUSED[name]), (torch.randn(4, 6, 5), torch.randint(0, CLASSES, (4, 6))))
