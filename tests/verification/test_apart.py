"""The reference of `verify`: a run of its own, also of models that copies do not stand for; what is noise, and what is lifted."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from autopar.verification.apart import apart, in_dtype
from autopar.verification.differences import compare
from autopar.verification.single import lifting


class Closes(nn.Module):
    """A lambda over a submodule, a batch norm, a counter and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.calls, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), 0, list[int]()
        self.gate = lambda x: x * self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return self.norm(self.gate(x)).square().sum() + self.inner.bias.sum()


def _normed() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), nn.Flatten())
    model(torch.randn(2, 4))  # its weight is now a tensor that autograd made
    return model


@pytest.mark.parametrize("make", [Closes, _normed])
def test_a_run_of_its_own(make: type[nn.Module]) -> None:
    model, x = make(), torch.randn(3, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with apart(model) as alone:
        alone(x).sum().backward()
        assert all(parameter.grad is not None for parameter in alone.parameters())
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.sub_(1.0)
        in_dtype(alone, torch.float64)
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in model.parameters())
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert getattr(model, "calls", 0) == 0 and not getattr(model, "seen", ())
    model(x)


class OldConstant(nn.Module):
    """Scales by the root of a constant in float32, whatever the model is in (TabNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * torch.sqrt(torch.FloatTensor([0.3]))).sum()


def test_constants_that_no_dtype_made_are_lifted() -> None:
    model = OldConstant().double()
    with lifting():
        lifted = model(torch.ones(2, 4).double())
    expected = model.inner(torch.ones(2, 4).double()).sum() * torch.tensor(0.3).double().sqrt()
    torch.testing.assert_close(lifted, expected, rtol=1e-14, atol=0)


def test_a_plain_model_is_copied() -> None:
    model = nn.Linear(4, 4)
    with apart(model) as alone:
        assert alone is not model


def test_complex_parameters_stay_complex() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))
    assert in_dtype(model, torch.float64).weight.dtype is torch.complex128
    assert in_dtype(model, torch.bfloat16).weight.dtype is torch.complex128


def test_a_running_mean_of_what_is_centred_is_noise() -> None:
    def run(mean: float, loss: float = 1.0) -> dict[str, object]:
        state = {"norm.running_mean": torch.full((2,), mean).double(), "norm.running_var": torch.ones(2).double()}
        return {"loss": torch.tensor(loss).double(), "outputs": {}, "gradients": {}, "state": state}

    assert all(each.equal for each in compare(run(3e-18), run(-2e-18), "float64", None))
    assert not all(each.equal for each in compare(run(3e-18), run(1e-7), "float64", None))
    assert not all(each.equal for each in compare(run(1e-2), run(1.0001e-2), "float64", None))
