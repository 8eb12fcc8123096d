"""Writes in place whose gradients torch's functional form loses: those that autograd does not see, and diagonals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

INFINITY = float("inf")


def clamped(h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h.clamp_(-0.1, 0.1)
    return h


def several(h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
        h[:, 0] = 0
        h[y > 0] = 1
        h.copy_(h.round())
    return h


def view(h: Tensor, y: Tensor) -> Tensor:
    before = h.view(-1)
    with torch.no_grad():
        h.view(-1).add_(1)
    return h + before.view_as(h)


def data(h: Tensor, y: Tensor) -> Tensor:
    h.data.mul_(2)
    h.data[:, 1] = 3
    return h


def infinite(h: Tensor, y: Tensor) -> Tensor:
    h.data.masked_fill_(y > 1, -INFINITY)
    h.data.mul_(2)
    return h.softmax(-1)


def infinite_before(h: Tensor, y: Tensor) -> Tensor:
    h = h.masked_fill(y > 1, -INFINITY)
    h.data.mul_(2)
    return h.softmax(-1)


def detached(h: Tensor, y: Tensor) -> Tensor:
    q = h.detach()
    q.mul_(2)
    return h * q


def seen_between(h: Tensor, y: Tensor) -> Tensor:
    h.data.mul_(2)
    h.mul_(3)
    h.data.add_(1)
    return h


def without_gradient(h: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.zeros_like(h)
        mask[:, 1:] = h[:, :-1]
    return h * mask


WRITES = [clamped, several, view, data, infinite, infinite_before, detached, seen_between, without_gradient]


def square(h: Tensor, y: Tensor) -> Tensor:
    return (h.t() @ y).fill_diagonal_(2.0)


def wide(h: Tensor, y: Tensor) -> Tensor:
    return (h.t() @ y)[:3].fill_diagonal_(2.0, wrap=True)


def tall(h: Tensor, y: Tensor) -> Tensor:
    return (h.t() @ y)[:, :2].fill_diagonal_(2.0)


def wrapped(h: Tensor, y: Tensor) -> Tensor:
    return (h.t() @ y)[:, :2].fill_diagonal_(2.0, wrap=True)


def cube(h: Tensor, y: Tensor) -> Tensor:
    return (h[:4, :4, None] * y[:4, None, :4]).fill_diagonal_(2.0)


class Written(nn.Module):
    """A layer whose result is written."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(6, 6), write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        return self.write(h * 1, y).pow(2).mean() + h.mean()


@pytest.mark.parametrize("write", [*WRITES, square, wide, tall, wrapped, cube], ids=lambda write: write.__name__)
def test_gradients_are_those_of_eager(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Written(write).double()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64).unbind()
    graph = capture(model, (x, y))
    loss, gradients = loss_and_gradients(graph, dict(model.state_dict()), {"x": x, "y": y})
    expected = model(x, y)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_writes_without_gradient_stay() -> None:
    graph = capture(Written(without_gradient), (torch.randn(8, 6), torch.randn(8, 6)))
    assert not any("nan_to_num" in node.op for block in graph.blocks for node in block.nodes)


def test_gradient_of_what_is_written_is_refused() -> None:
    def write(h: Tensor, y: Tensor) -> Tensor:
        q = h.detach()
        q.mul_(h)
        return q

    with pytest.raises(CaptureError, match=r"test_unseen_writes.py:\d+.*h = h \+ \(new - h\)\.detach\(\)"):
        capture(Written(write), (torch.randn(8, 6), torch.randn(8, 6)))
