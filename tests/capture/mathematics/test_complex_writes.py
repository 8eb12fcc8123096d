"""Writes into complex tensors that take gradients: torch has no gradient of their functional form, and eager has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn

from autopar.capture import capture

Write = Callable[[Tensor], Tensor | None]


def frequency(f: Tensor) -> None:
    f[:, 0] = 0


def row(f: Tensor) -> None:
    f[0] = 1j


def last(f: Tensor) -> None:
    f[..., -1] = f[..., 1] * 2


def others(f: Tensor) -> None:
    f[1:] += f[:-1].clone()


def every_second(f: Tensor) -> None:
    f[:, ::2] = f[:, 1:5:2].sum(1, keepdim=True)


def emptied(f: Tensor) -> None:
    f[:, 5:].zero_()


def conjugate(f: Tensor) -> Tensor:
    h = f.conj()
    g = torch.zeros_like(h)
    for index in (0, 2, 5):
        g[:, index] = h[:, index]
    g[1] = f[0].conj()
    return g


def into_a_conjugate(f: Tensor) -> Tensor:
    h = f.conj().clone()
    h[:, 1] = f[:, 2]
    return h


class Spectrum(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(6, 12, dtype=torch.float64), write

    def forward(self, x: Tensor) -> Tensor:
        f = torch.fft.rfft(self.layer(x))
        found = self.write(f)
        return torch.fft.irfft(f if found is None else found, n=12).square().sum()


WRITES = [frequency, row, last, others, every_second, emptied, conjugate, into_a_conjugate]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_equal_eager(write: Write) -> None:
    torch.manual_seed(0)
    model, x = Spectrum(write), torch.randn(8, 6, dtype=torch.float64)
    loss, gradients = loss_and_gradients(capture(model, (x,)), dict(model.state_dict()), {"x": x})
    expected = model(x)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
