"""Derivatives that a forward takes with ``torch.func`` are those of eager, under ``torch.no_grad()`` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vjp
from torch.nn.functional import linear

from autopar.capture import capture


class Inner(nn.Module):
    """A step by the gradient of an inner loss, and what `outside` calls around it."""

    def __init__(self, outside: Any = torch.enable_grad) -> None:
        super().__init__()
        self.first, self.second, self.outside = nn.Linear(6, 4), nn.Linear(4, 3), outside

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, weight = self.first(x).tanh(), self.second.weight
        with self.outside():
            gradient, more = self.derivative(lambda w: (linear(h, w) - y).square().mean(), weight)
        return (linear(h, weight - 0.1 * gradient) - y).square().mean() + more

    def derivative(self, loss: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Any]:
        return grad(loss)(weight), 0


class WithValue(Inner):
    def derivative(self, loss: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Any]:
        return grad_and_value(loss)(weight)


class WithMore(Inner):
    def derivative(self, loss: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Any]:
        gradient, (value, double) = grad_and_value(lambda w: (loss(w), 2 * w.sum()), has_aux=True)(weight)
        other, more = grad(lambda w: (loss(w), w.mean()), has_aux=True)(weight)
        return gradient + other, value * double + more


class ByProduct(Inner):
    def derivative(self, loss: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Any]:
        value, product = vjp(loss, weight)
        return product(torch.ones_like(value) * 2)[0], value


class OfSeveral(Inner):
    def derivative(self, loss: Callable[[Tensor], Tensor], weight: Tensor) -> tuple[Tensor, Any]:
        values = {"a": weight, "b": weight.sum(0)}
        found, _ = grad(lambda v, k: loss(v["a"]) * k.sum() + v["b"].sin().sum(), argnums=(0, 1))(values, weight[0])
        (more,) = vjp(lambda v: {"c": (v.sin(), v * 2)}, weight)[1]({"c": (weight, weight)})
        return found["a"] + more, found["b"].sum()


def check(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """The captured graph has the loss and the gradients of eager."""
    loss = model.double()(**batch)
    graph = capture(model, (), batch)
    if loss.requires_grad:
        loss.backward()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.enable_grad():
        found, gradients = loss_and_gradients(graph, state, batch)
    assert found == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters() if loss.requires_grad else ():
        torch.testing.assert_close(gradients.get(name), parameter.grad, msg=name)


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("kind", [Inner, WithValue, WithMore, ByProduct, OfSeveral])
@pytest.mark.parametrize("trains", [True, False])
def test_equals_eager(kind: type[Inner], outside: Any, trains: bool) -> None:
    """Under ``no_grad`` in the forward, or around a call at a further batch size, the derivatives by parameters were zeros,
    without a word; ``grad_and_value`` and ``vjp`` of a parameter were refused."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(trains):
        check(kind(outside), {"x": torch.randn(5, 6).double(), "y": torch.randn(5, 3).double()})


def test_linear_of_several_dimensions() -> None:
    """It was refused: export lost its derivative."""
    check(Inner(), {"x": torch.randn(4, 5, 6).double(), "y": torch.randn(4, 5, 3).double()})
