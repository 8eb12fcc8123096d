"""Constructs that export loses or fails in: each is equal, or one line with place, construct and remedy in words of models."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError

INTERNAL = re.compile(r"[A-Z]\w+(Error|Exception)\b|[Ff]ake|[Pp]roxy|dynamo|functorch|SymInt|TensorWrapper|meta")


class Deep(nn.Module):
    def __init__(self, body: Callable[[Deep, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.trained = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, f: nn.Module, x: Tensor) -> Tensor:
        return self.body(self, f, x)


class Net(nn.Module):
    def __init__(self, body: Callable[[Deep, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.deep = nn.Linear(4, 4), Deep(body)

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(self.inner, x).square().mean()


def inner_step(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(f(x).square().sum(), f.weight, create_graph=True)
    return nn.functional.linear(x, f.weight - 0.1 * gradient)


def gradient_of_function(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    return torch.func.grad(lambda weight: (x @ weight).square().sum())(f.weight) + 0 * f(x).mean()


def complex_numbers(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return (f(x) * (1 + 2j)).imag + torch.exp(0.5j * f(x)).real + (torch.complex(f(x), x) - 1j).abs()


def selected_by_a_number(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    return torch.index_select(f(x), 1, f.weight.sum(1).argmax())


EQUAL = (selected_by_a_number, inner_step, gradient_of_function, complex_numbers)


@pytest.mark.parametrize("body", EQUAL)
def test_equals_eager(body: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Net(body).double(), torch.randn(6, 4, dtype=torch.float64)
    check_captured(capture(model, (x,)), model, {"x": x}, loss_rtol=1e-9, rtol=1e-7, atol=1e-9)


def penalty(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(f(leaf).tanh().sum(), leaf, create_graph=True)
    return gradient


class OwnCheckpoint(torch.autograd.Function):
    """As guided diffusion has it."""

    @staticmethod
    def forward(ctx: Any, function: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_(True)
            found = ctx.function(x.view_as(x))
        return None, *torch.autograd.grad(found, [x, *ctx.parameters], gradient, allow_unused=True)


def checkpoint(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return OwnCheckpoint.apply(f, f(x), *f.parameters())  # type: ignore[no-any-return]


def jacobian(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: f(row)))(x)


def backward(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    f(x).sum().backward()
    return f(x)


def packed(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    lengths = (x > 0).sum(-1).clamp(1)
    sequence = nn.utils.rnn.pack_padded_sequence(x[..., None].expand(-1, -1, 4), lengths, True, enforce_sorted=False)
    return f(nn.utils.rnn.pad_packed_sequence(deep.lstm(sequence)[0], True)[0])


def momentum(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        deep.frozen.mul_(0.9).add_(f.weight[0] * 0.1)
    return f(x) * deep.frozen


def momentum_by_data(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    deep.frozen.data = deep.frozen.data * 0.9 + f.weight.data[0] * 0.1
    return f(x) * deep.frozen


def clamped_weights(deep: Deep, f: nn.Linear, x: Tensor) -> Tensor:
    deep.trained.data.clamp_(-1, 1)
    return f(x) * deep.trained


def numpy_inside(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return f(torch.from_numpy(x.numpy() * 2))


def in_a_function(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return _sliced(f(x), x)


def _sliced(y: Tensor, x: Tensor) -> Tensor:
    return y.topk(int(x.argmax()) % 3 + 1).values


def row_of_a_number(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return f(x)[:, f.weight.sum(1).argmax()]


def generator(deep: Deep, f: nn.Module, x: Tensor) -> Tensor:
    return f(x) + torch.randn(4, generator=torch.Generator().manual_seed(0))


REFUSED: dict[Callable[..., Tensor], str] = {
    penalty: r"autograd.grad inside of the forward .*autopar.opaque",
    checkpoint: r"has a backward that takes derivatives itself.*or torch.utils.checkpoint",
    jacobian: r"\(module deep\): derivatives inside of the forward .*autopar.opaque",
    backward: r"backward\(\) inside of the forward",
    packed: r"pack_padded_sequence .* mask",
    momentum: r"the parameter deep.frozen, which is frozen: make it a buffer",
    momentum_by_data: r"x.data = .*register_buffer",
    clamped_weights: r"the parameter deep.trained, which the optimizer trains",
    numpy_inside: r"\(module deep\): numpy .*function of torch",
    row_of_a_number: r"\(module deep\): .* data of a tensor; .* torch.index_select where a tensor of one number is an index",
    in_a_function: r"\(module deep\): .* data of a tensor",
    generator: r"a generator",
}


@pytest.mark.parametrize("body", REFUSED)
def test_refused_in_one_line(body: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[body]) as caught:
        capture(Net(body), (torch.randn(6, 4),))
    line = str(caught.value)
    assert "\n" not in line and not INTERNAL.search(line), line
    assert "test_constructs.py:" in line or "parameter deep." in line
    assert "the model's own forward" not in line
