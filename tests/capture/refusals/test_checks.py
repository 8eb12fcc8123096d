"""Checks of data that only raise or warn are left out, and noted; what decides anything else is refused.

PYTEST_DONT_REWRITE: assertions are looked for in the source.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.tracing.data import checks
from autopar.errors import CaptureError

CLASSES = 4


class Net(nn.Module):
    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.check = nn.Linear(4, 4), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.inner(x).square().mean()


def raises(x: Tensor) -> None:
    if x.max() >= CLASSES:
        raise ValueError(f"at most {CLASSES}, not {x.max().item()}")


def several(x: Tensor, strict: bool = True) -> None:
    if strict and (x.max() >= CLASSES or not (x.isfinite().all() and x.min() > -CLASSES)):
        message = "out of range"
        raise ValueError(message)


def otherwise(x: Tensor) -> None:
    if (x < CLASSES).all() and (x > -CLASSES).all():
        pass
    else:
        raise ValueError("out of range")


def asserts(x: Tensor) -> None:
    assert x.abs().max() < CLASSES and not x.isnan().any(), "out of range"
    assert all((row < CLASSES).all() for row in x.unbind(1))
    assert -CLASSES <= x.min().item() <= CLASSES
    assert torch.equal(x, x) and torch.allclose(x, x)
    torch._assert(x.max() < CLASSES, "out of range")
    torch._check(x.argmax(-1).max().item() < CLASSES)


def counts(x: Tensor) -> None:
    if (x > 0).sum().item() + x[x <= 0].numel() != x.numel():
        raise ValueError("not a number")


def warned(x: Tensor) -> None:
    if x.isnan().any():
        warnings.warn("not a number", stacklevel=1)
    if (x == 0).all():
        logging.getLogger(__name__).warning("zeros")


def without_gradients(x: Tensor) -> None:
    with torch.no_grad():
        if x.sum() > 1e6:
            raise ValueError("large")


def of_a_distribution(x: Tensor) -> None:
    torch.distributions.Normal(x, x.abs() + 1, validate_args=True).log_prob(x)  # dynamo, once imported, turns the default off


def of_a_loss(x: Tensor) -> None:
    nn.functional.gaussian_nll_loss(x, x, x.abs() + 1)


CHECKS = (of_a_distribution, of_a_loss, raises, several, otherwise, asserts, counts, warned, without_gradients)


@pytest.mark.parametrize("check", CHECKS)
def test_left_out_and_noted(check: Callable[[Tensor], object]) -> None:
    torch.manual_seed(0)
    model, x = Net(check).double(), torch.randn(6, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    assert any("checks of data are not made: test_checks.py:" in note for note in graph.notes)
    assert len(graph.blocks) == 1 and not any("item" in node.op for node in graph.blocks[0].nodes)
    check_captured(graph, model, {"x": x}, loss_rtol=1e-7, rtol=1e-6, atol=1e-9)


def caught(x: Tensor) -> None:
    try:
        raises(x)
    except ValueError:
        x.mul_(2)


def decides(x: Tensor) -> None:
    if x.max() > CLASSES:
        x.mul_(2)


def inside_a_condition(x: Tensor) -> None:
    if (2 if x.max() > 0 else 1) > len(x.shape):
        raise ValueError("three")


@pytest.mark.parametrize("check", (caught, decides, inside_a_condition))
def test_what_decides_is_refused(check: Callable[[Tensor], object]) -> None:
    with pytest.raises(CaptureError, match=r"test_checks.py:\d+.*depends on the data of a tensor"):
        capture(Net(check), (torch.randn(6, 4),))


def asks_often(x: Tensor) -> None:
    for _ in range(20):
        torch._check(x.argmax(-1).max().item() < CLASSES)


def test_a_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2-VL asks thousands of times, from files of thousands of lines: its refusal took more than eight minutes."""
    read: list[str] = []
    parse = ast.parse

    def parsed(source: str, *rest: object, **options: object) -> ast.AST:
        read.append(source)
        return parse(source, *rest, **options)  # type: ignore[call-overload,no-any-return]

    checks._branches_of.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", parsed)
        capture(Net(asks_often), (torch.randn(6, 4),))
    assert len([each for each in read if "def asks_often" in each]) == 1
