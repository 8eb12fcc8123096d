"""Cross entropy that a model writes out: of token log-probabilities, which may shard the vocabulary, and of ``nll_loss``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture

CLASSES = 16
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A head of classes and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(8, CLASSES), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def operations(loss: Loss) -> list[str]:
    graph = capture(Model(loss), (torch.rand(4, 3, 8), torch.randint(CLASSES, (4, 3))))
    return [node.op for block in graph.blocks for node in block.nodes]


def selected(x: Tensor, labels: Tensor) -> Tensor:
    return x.gather(-1, labels.unsqueeze(-1))


def masked(x: Tensor, labels: Tensor) -> Tensor:
    mask = (labels > 3).to(x.dtype)
    return -(selected(x.log_softmax(-1), labels).squeeze(-1) * mask).sum() / mask.sum()


def ratio(x: Tensor, labels: Tensor) -> Tensor:
    """The clipped ratio of PPO."""
    now = selected(F.log_softmax(x, dim=-1), labels)[..., 0]
    ratio = (now - now.detach()).exp()
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()


FORMS: dict[str, Loss] = {
    "log_softmax": lambda x, labels: -selected(x.log_softmax(2), labels).mean(),
    "mask": masked,
    "ratio": ratio,
    "logsumexp": lambda x, labels: (x.logsumexp(-1) - selected(x, labels).squeeze(-1)).mean(),
    "kept dims": lambda x, labels: (selected(x, labels) - x.logsumexp(-1, keepdim=True)).sum().neg(),
    "weights": lambda x, labels: F.cross_entropy(x.flatten(0, 1), labels.flatten(), torch.arange(CLASSES) / CLASSES),
    "of each": lambda x, labels: F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").square().sum(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    ops = operations(FORMS[form])
    assert ops.count("ap.token_log_probs") == 1
    assert not {"aten.gather", "aten.logsumexp"} & set(ops) and not any("log_softmax" in op for op in ops)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nll_loss_of_log_softmax_is_cross_entropy(reduction: str) -> None:
    def written(x: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x.flatten(0, 1), dim=1), labels.flatten(), reduction=reduction, ignore_index=3)

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=3)

    assert operations(written) == operations(loss)


def entropy(x: Tensor, labels: Tensor) -> Tensor:
    logs = x.log_softmax(-1)
    return (logs.exp() * logs).sum() - selected(logs, labels).mean()


def z_loss(x: Tensor, labels: Tensor) -> Tensor:
    total = x.logsumexp(-1)
    return (total - selected(x, labels).squeeze(-1)).mean() + total.square().mean()


def without_gradients(x: Tensor, labels: Tensor) -> Tensor:
    """The log-probabilities of an old policy."""
    with torch.no_grad():
        logs = x.log_softmax(-1)
    return selected(logs, labels).mean() + x.square().mean()


def normalizer_without_gradients(x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        total = x.logsumexp(-1)
    return (selected(x, labels).squeeze(-1) - total).mean()


def selection_without_gradients(x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        chosen = selected(x, labels).squeeze(-1)
    return (chosen - x.logsumexp(-1)).mean()


def integers(x: Tensor, labels: Tensor) -> Tensor:
    whole = (3 * x).long()
    return (selected(whole, labels).squeeze(-1) - whole.logsumexp(-1)).mean() + x.sum()


ALIKE: dict[str, Loss] = {
    "no gradients": without_gradients,
    "no gradients of the normalizer": normalizer_without_gradients,
    "no gradients of the selection": selection_without_gradients,
    "integers": integers,
    "read twice": entropy,
    "sum read twice": z_loss,
    "other dimension": lambda x, labels: x.log_softmax(1).gather(-1, labels.unsqueeze(-1)).mean(),
    "several": lambda x, labels: x.log_softmax(-1).gather(-1, labels.unsqueeze(-1).repeat(1, 1, 2)).mean(),
    "other tensor": lambda x, labels: ((2 * x).logsumexp(-1) - selected(x, labels).squeeze(-1)).mean(),
    "nll of others": lambda x, labels: F.nll_loss(x.softmax(-1).flatten(0, 1), labels.flatten()),
}


@pytest.mark.parametrize("form", ALIKE)
def test_others_stay(form: str) -> None:
    ops = operations(ALIKE[form])
    assert "aten.gather" in ops and "ap.token_log_probs" not in ops and "ap.cross_entropy_sum" not in ops
