"""The exports that tests share: those of equal models, whatever their parameters hold, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capture_cache import _key
from torch import Tensor, nn

from autopar.capture.options import CaptureOptions

FACTOR = 2.0


class Net(nn.Module):
    """With a buffer, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor, self.extra = nn.Linear(4, 4), 2.0, torch.ones(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale * self.factor + self.extra).sum() * FACTOR


def key_of(model: nn.Module, x: Tensor | None = None) -> Any:
    return _key(model, (), {"x": torch.randn(2, 4) if x is None else x}, CaptureOptions())


def test_values_of_state_and_inputs_do_not_count() -> None:
    model = Net()
    model(torch.ones(2, 4)).backward()
    model.scale.mul_(3)
    assert key_of(model) == key_of(Net())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda model: setattr(model, "factor", 3.0),
    "a constant": lambda model: model.extra.mul_(2),
    "a frozen parameter": lambda model: model.inner.bias.requires_grad_(False),
    "a dtype": lambda model: model.double(),
    "a mode": lambda model: model.eval(),
    "a tie": lambda model: setattr(model, "scale", model.extra),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_export_reads_counts(name: str) -> None:
    model = Net()
    CHANGES[name](model)
    assert key_of(model) != key_of(Net())


def test_globals_and_shapes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of(Net(), torch.randn(3, 4)) != key_of(Net())
    before = key_of(Net())
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert key_of(Net()) != before


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_attributes_of_classes_code_and_autocast_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before, with_function = key_of(Net()), Net()
    with torch.autocast("cpu", torch.bfloat16):
        assert key_of(Net()) != before
    with_function.double = double  # type: ignore[assignment]
    of_function = key_of(with_function)
    with monkeypatch.context() as patch:
        patch.setattr(Net, "forward", lambda self, x: self.inner(x).sum())
        assert key_of(Net()) != before
    with monkeypatch.context() as patch:
        patch.setattr(double, "__code__", (lambda x: 3 * x).__code__)
        assert key_of(with_function) != of_function
    assert key_of(Net()) == before and key_of(with_function) == of_function


def test_a_parameter_with_a_hook_is_exported_anew() -> None:
    """The capture refuses it."""
    model = Net()
    model.inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(Exception, match="more to it than its values"):
        key_of(model)
