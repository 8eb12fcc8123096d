"""Calls that differ in what a forward sees of its arguments beside their shapes: each equals one process."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError

FORCE = "dp=2,zero=3"
ONE, TWO = (torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (0, 1))


class Asks(nn.Module):
    """A loss of a function of the forward."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6).double(), function

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]

    def forward(self, x: Any, y: Any = False, **more: Any) -> Tensor:
        return self.function(self, x, y, **more)


def in_order(model: Asks, x: Any, y: Any, **more: Tensor) -> Tensor:
    parts = more or x
    return sum((model.loss(each) * (index + 1) for index, each in enumerate(parts.values())), torch.zeros(()).double())


def by_class(model: Asks, x: Any, y: Any) -> Tensor:
    (each,) = x.values() if isinstance(x, dict) else x
    return model.loss(each) * (2 if isinstance(x, (tuple, OrderedDict)) else 1)


def by_identity(model: Asks, x: Tensor, y: Any) -> Tensor:
    return model.loss(x) * 2 if x is y else model.loss(x) + model.loss(y)


def by_layout(model: Asks, x: Tensor, y: Any) -> Tensor:
    return model.loss(x) * (1 if x.is_contiguous() else 2)


def by_leaf(model: Asks, x: Tensor, y: Any) -> Tensor:
    return model.loss(x) * (1 if x.is_leaf else 2)


def by_flag(model: Asks, x: Tensor, y: Any) -> Tensor:
    return model.loss(x) * (2 if y is None else 1)


def by_determinism(model: Asks, x: Tensor, y: Any) -> Tensor:
    return model.loss(x) * (2 if torch.are_deterministic_algorithms_enabled() else 1)


COLUMNS = ONE.t().contiguous().t()
CASES: tuple[tuple[Callable[..., Tensor], Sequence[dict[str, Any]], int], ...] = (
    (in_order, [{"x": {"a": ONE, "b": TWO}}, {"x": {"b": ONE, "a": TWO}}, {"x": {"a": TWO, "b": ONE}}], 2),
    (in_order, [{"x": ONE, "a": ONE, "b": TWO}, {"b": ONE, "x": ONE, "a": TWO}, {"a": ONE, "b": TWO, "x": ONE}], 2),
    (by_class, [{"x": [ONE]}, {"x": (ONE,)}, {"x": [TWO]}], 2),
    (by_class, [{"x": {"a": ONE}}, {"x": OrderedDict(a=ONE)}], 2),
    (by_identity, [{"x": ONE, "y": TWO}, {"x": ONE, "y": ONE}, {"x": ONE, "y": ONE.clone()}, {"x": TWO, "y": TWO}], 2),
    (by_identity, [{"x": ONE, "y": ONE}, {"x": ONE, "y": TWO}], 2),
    (by_layout, [{"x": ONE}, {"x": COLUMNS}, {"x": torch.stack((ONE, TWO), 2)[..., 1]}, {"x": TWO}], 3),
    (by_layout, [{"x": COLUMNS}, {"x": ONE}], 2),
    (by_flag, [{"x": ONE}, {"x": ONE, "y": None}, {"x": ONE, "y": False}], 2),
)


def check_calls(index: int) -> None:
    function, calls, kinds = CASES[index]
    torch.manual_seed(0)
    plain = Asks(function)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", calls[0], force=FORCE, cache=False)
    for call in calls:
        _same(parallel, plain, call)
    assert len(set(parallel.variants.programs.values())) == kinds


def _same(parallel: Any, plain: nn.Module, call: dict[str, Any]) -> None:
    losses = [model(**call) for model in (parallel, plain)]
    torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-12, atol=0.0)
    for model, loss in zip((parallel, plain), losses, strict=True):
        model.zero_grad()
        loss.backward()
    same_gradients(parallel, plain)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: f"{CASES[index][0].__name__}-{index}")
def test_each_kind_has_its_program(index: int, ranks: RankPool) -> None:
    ranks.run(check_calls, index, world=2)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_modes() -> None:
    torch.manual_seed(0)
    plain = Asks(by_determinism)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", {"x": ONE}, force=FORCE, cache=False)
    _same(parallel, plain, {"x": ONE})
    with deterministic():
        _same(parallel, plain, {"x": ONE})
    leaf = autopar.parallelize(Asks(by_leaf), "local:2", {"x": ONE}, force=FORCE, cache=False)
    with pytest.raises(BatchError, match="argument x is no leaf of autograd, and the forward asks is_leaf"):
        leaf(x=ONE.clone().requires_grad_() * 1)


def test_modes_and_leaves(ranks: RankPool) -> None:
    ranks.run(check_modes, world=2)
