"""Calls of functions that torch.compile does not trace: autograd's gradients, and nothing of the operands is held."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.oracles.live_storages import Storages
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.runtime.compat.eager_call import call_eagerly, gradients_of


def function(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Saves views of operands, a part of one, and results."""
    return (x.t()[:3].t().reshape(-1, 3).exp() @ weight + y[1]).sin() * x[:, :1]


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((4, 5), (2, 6), (3, 6))]


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)])
def test_gradients_are_those_of_autograd(wanted: tuple[bool, ...]) -> None:
    """Also again, as for a graph that is retained, and of operands that were computed anew in another layout."""
    given = operands()
    leaves = [x.clone().requires_grad_(want) for x, want in zip(given, wanted, strict=True)]
    expected = function(*leaves)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [x for x in leaves if x.requires_grad], grad)
    result, handle = call_eagerly(function, given, wanted)
    assert result is not None and not result.requires_grad and torch.equal(result, expected)
    other = [x.t().contiguous().t() for x in given]
    for anew in (given, [x.clone() for x in given], other):
        for found, of in zip(gradients_of(handle, grad, anew), gradients, strict=True):
            torch.testing.assert_close(found, of, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_held() -> None:
    _, handle = call_eagerly(function, operands(), (False, False, False))
    assert not hasattr(handle.untyped_storage(), "rides")


def test_operands_and_results_are_not_held() -> None:
    """What is alive after a call is what autograd saves beside its operands."""
    given = operands()
    storages = [StorageWeakRef(x.untyped_storage()) for x in given]
    with Storages() as made:
        result, handle = call_eagerly(function, given, (True, True, True))
        assert result is not None
        of_result = StorageWeakRef(result.untyped_storage())
        shape = result.shape
        del given, result
    assert all(each.expired() for each in (*storages, of_result))
    alive = sum(size for each, size in made.made.items() if not each.expired())
    saved = 8 * (4 * 3 + 2 * 4 * 6)  # the result of exp; the operand and the result of sin
    assert saved <= alive <= saved + 8 * 8  # and tensors of one element
    anew = operands()
    expected = [x.clone().requires_grad_() for x in anew]
    function(*expected).sum().backward()
    for found, leaf in zip(gradients_of(handle, torch.ones(shape, dtype=torch.float64), anew), expected, strict=True):
        torch.testing.assert_close(found, leaf.grad)


class Carry(torch.autograd.Function):
    """Zeros with the gradient of a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Sent(NamedTuple):
    """Tensors in flight: the first carries gradients, the second has values."""

    tokens: tuple[Tensor, ...]
    times: int


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_in_flight_goes_by_its_handle(wanted: bool) -> None:
    def send(x: Tensor) -> Any:
        return Sent((Carry.apply(x.sin()), x.detach().sin()), 3)

    def receive(sent: Sent, weight: Tensor) -> Tensor:
        return (sent.tokens[0] + sent.tokens[1]).exp() * weight * sent.times

    x, _, _ = operands()
    weight = torch.randn_like(x)
    nothing, sent = call_eagerly(send, [x], [wanted])
    result, handle = call_eagerly(receive, [sent, weight], [wanted, True])
    assert nothing is None and result is not None
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = receive(send(leaves[0]), leaves[1])
    torch.testing.assert_close(result, expected.detach())
    gradients = gradients_of(handle, torch.ones_like(result), [sent, weight])
    of_x, of_weight = torch.autograd.grad(expected.sum(), leaves)
    torch.testing.assert_close(gradients[-1], of_weight)
    if wanted:
        torch.testing.assert_close(gradients_of(sent, gradients[0], [x])[0], of_x)
