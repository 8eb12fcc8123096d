"""Habits of changing what a forward reads that is no argument: attributes, settings, globals, generators (docs/habits.md)."""

from __future__ import annotations

import copy
import os
import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.models import habit_model
from support.models.habit_model import Net, batch, net
from torch import Tensor, nn

import autopar


def equal_at(path: str, change: Callable[[Any, float], None], values: tuple[float, ...] = (0.0, 2.0, 0.5)) -> Any:
    """The parallel model, equal to one process at all values, the last of which is the one of the capture."""
    parallel, reference = parallel_of(net("reads"), path), net("reads")
    for value in values:
        for model in (parallel, reference):
            change(model, value)
        equals_one_process(parallel, reference, steps=1)
    return parallel


def programs(parallel: Any) -> int:
    return len(set(parallel.variants.programs.values()))


@of("reads")
def change_an_attribute(plan: str) -> None:
    """Of a module that the forward reads; a value that comes back finds its program, and what nobody reads makes none."""

    def set_alpha(model: Any, value: float) -> None:
        model.layers[0].alpha = value

    parallel = equal_at(plan, set_alpha)
    assert programs(parallel) == 3
    parallel.layers[0].alpha, parallel.global_step = 2.0, 17
    one_step(parallel)
    assert programs(parallel) == 3 and (parallel.layers[0].alpha, parallel.global_step) == (2.0, 17)
    parallel.eval()
    reference = net("reads").eval()
    reference.load_state_dict(parallel.full_state())
    reference.layers[0].alpha = 2.0
    torch.testing.assert_close(parallel(**batch()).detach(), reference(**batch()).detach())


@of("reads")
def set_an_attribute_of_the_plain_model(plan: str) -> str:
    """Refused where the parallel model has another value."""
    model, reference = net("reads"), net("reads")
    parallel = parallel_of(model, plan)
    model.remark = "read by no forward"
    for each in (model, parallel, reference):
        each.layers[0].alpha = 0.5
    equals_one_process(parallel, reference, steps=1)
    model.layers[0].alpha = 0.25
    return refusal(lambda: parallel(**batch()))


@of("reads")
def change_the_settings(plan: str) -> None:
    def set_gain(model: Any, value: float) -> None:
        model.layers[1].settings.gains[1] = value

    equal_at(plan, set_gain, (0.0, 1.5))


@of("reads")
def change_a_global(plan: str) -> None:
    def set_factor(model: Any, value: float) -> None:
        habit_model.SETTINGS["factor"] = value

    try:
        equal_at(plan, set_factor, (0.0, 1.25))
    finally:
        habit_model.SETTINGS["factor"] = 1.25


@of("reads")
def anneal_an_attribute(plan: str) -> str:
    parallel = parallel_of(net("reads"), plan)

    def anneal() -> None:
        for step in range(6):
            for layer in parallel.layers:
                layer.alpha = 0.1 * step
            one_step(parallel)

    return warning_of(anneal)


@of("dropout")
def switch_dropout_off(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout"), plan), net("dropout")
    one_step(parallel)
    parallel.zero_grad()
    for model in (parallel, reference):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    equals_one_process(parallel, reference)


@of("reads")
def different_attributes(plan: str) -> str:
    parallel = parallel_of(net("reads"), plan)
    parallel.layers[0].alpha = 1.0 + dist.get_rank()
    return refusal(lambda: parallel(**batch()))


@of("reads")
def change_an_attribute_of_a_copy(plan: str) -> None:
    parallel, reference = parallel_of(net("reads"), plan), net("reads")
    other = copy.deepcopy(parallel)
    other.layers[0].alpha = 0.0
    assert parallel.layers[0].alpha == 0.5
    equals_one_process(parallel, reference, steps=1)
    second = net("reads")
    second.layers[0].alpha = 0.0
    equals_one_process(other, second, steps=1)


class Computing(Net):
    """A model whose forward does `compute` first, and multiplies its loss by that."""

    compute: Callable[[Any, Tensor], Any] = staticmethod(lambda model, x: 1.0)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x, ids) * self.compute(self, x)


def computing(compute: Callable[[Any, Tensor], Any], **attributes: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = type("Own", (Computing,), {"compute": staticmethod(compute), "mask": None})().double()
    vars(model).update(attributes)
    return model


def start(model: nn.Module) -> Any:
    return autopar.parallelize(model, cluster(), batch(), force="tp=2", time_limit_seconds=5, cache=False)


def said_at_start(model: nn.Module, row: str) -> str:
    """The warning, which rank 0 says."""
    said = warning_of(lambda: start(model))
    return said if dist.get_rank() == 0 else ROWS[row][1]


def draw_by_python(plan: str) -> str:
    return refusal(lambda: start(computing(lambda model, x: random.uniform(0.5, 1.5))))


def draw_by_numpy(plan: str) -> str:
    own = computing(lambda model, x: float(model.draws.random()), draws=numpy.random.default_rng(0))
    assert "Generator random generator" in refusal(lambda: start(own))
    return refusal(lambda: start(computing(lambda model, x: float(numpy.random.rand()))))


def _count(model: Any, x: Tensor) -> float:
    model.calls += 1
    return 1.0 / model.calls


def count_calls(plan: str) -> str:
    return refusal(lambda: start(computing(_count, calls=0)))


CALLS = 0


def _count_globally(model: Any, x: Tensor) -> float:
    global CALLS
    CALLS += 1
    return 1.0 / CALLS


def count_calls_in_a_global(plan: str) -> str:
    if dist.get_rank():  # the forward runs where it is captured
        with pytest.raises(autopar.AutoparError) as caught:
            start(computing(_count_globally))
        return str(caught.value)
    return refusal(lambda: start(computing(_count_globally)))


def _remember(model: Any, x: Tensor) -> float:
    if model.longest < 16:  # a cache: it does not change again
        model.longest = 16
    model.last = x
    return 1.0


def read_what_the_forward_sets(plan: str) -> str:
    parallel = start(computing(_remember, longest=0, last=None))
    one_step(parallel)
    assert not hasattr(parallel, "last")
    return refusal(lambda: parallel.last)


def change_a_closure(plan: str) -> None:
    factor = 1.5

    def compute(model: Any, x: Tensor) -> float:
        return factor

    parallel, reference = start(computing(compute)), computing(compute)
    for value in (1.5, 0.5):
        factor = value
        equals_one_process(parallel, reference, steps=1)


def ask_for_gradients(plan: str) -> None:
    """Each answer has a program of its own, in both modes, and none is made twice."""
    ask = lambda model, x: 1.0 if torch.is_grad_enabled() else 3.0 if model.training else 2.0  # noqa: E731
    parallel, reference = start(computing(ask)), computing(ask)
    for _ in range(2):
        equals_one_process(parallel, reference, steps=1)
        for training in (False, True):
            with torch.no_grad():
                torch.testing.assert_close(parallel.train(training)(**batch()), reference.train(training)(**batch()))
    assert programs(parallel) == 3


WEIGHTS = torch.ones((), dtype=torch.float64)
OUTSIDE = nn.Linear(1, 1).double()


def change_a_tensor(plan: str) -> None:
    """A global, in place and by name, and an attribute of the same name as a global, which is not read."""
    global WEIGHTS
    compute = lambda model, x: WEIGHTS * model.CALLS  # noqa: E731
    parallel, reference = start(computing(compute, CALLS=1.0)), computing(compute, CALLS=1.0)
    globals()["CALLS"] += 1
    for value in (1.0, 2.0):
        WEIGHTS.fill_(value)
        equals_one_process(parallel, reference, steps=1)
    WEIGHTS = torch.tensor(3.0, dtype=torch.float64)
    equals_one_process(parallel, reference, steps=1)
    assert programs(parallel) == 3


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amount = 0.5
        self.register_buffer("weights", torch.ones(3, dtype=torch.float64))

    def forward(self, loss: Tensor, target: Tensor) -> Tensor:
        return (loss * self.weights + self.amount).pow(2).mean() * target.mean()


def change_the_loss(plan: str) -> None:
    x, ids = batch().values()
    target, smooth, reference = torch.ones(len(x), dtype=torch.float64), Smooth(), net("plain")
    inputs = (x, ids, target)
    parallel = autopar.parallelize(
        net("plain"), cluster(), inputs, loss_fn=smooth, force="tp=2", time_limit_seconds=5, cache=False
    )  # fmt: skip
    for change in (lambda: None, lambda: setattr(smooth, "amount", 0.1), lambda: smooth.weights[:2].fill_(3.0)):
        change()
        torch.testing.assert_close(parallel(*inputs).detach(), smooth(reference(x, ids), target).detach())


def _fill_a_cache(model: Any, x: Tensor) -> Any:
    """One of positions, which stays, and one of the batch, which goes again."""
    if model.positions is None:
        model.positions = torch.ones_like(x)
    if model.hidden is None:
        model.hidden = x.mean()
    result = model.positions.sum() * model.hidden
    model.hidden = None
    return result


class Ledger:
    def __init__(self) -> None:
        self.held: Any = None


LEDGER: dict[str, Tensor] = {}


def keep_a_tensor(plan: str) -> str:
    """In an attribute, in one that is None at first, in a list, a dictionary, an object, a global. A cache of positions is none,
    and what no forward reads is warned of."""

    def compute(model: Any, x: Tensor) -> Any:
        if model.positions is None:
            model.positions = torch.arange(float(x.shape[0])) + torch.zeros_like(x).sum()
        where, mean = model.where, x.mean().detach()
        holder = where if where is not None else vars(model)
        before = holder[0] if isinstance(holder, list) else holder.get("x") if isinstance(holder, dict) else holder.held
        if isinstance(holder, Ledger):
            holder.held = mean
        else:
            holder[0 if isinstance(holder, list) else "x"] = mean
        return model.positions.sum() + (0 if before is None or not model.reads else before)

    for where in (Ledger(), LEDGER):  # all others are in tests/capture/refusals/test_states.py
        said = refusal(lambda where=where: start(computing(compute, where=where, positions=None, reads=True)))
        assert "test_frozen_reads_habits.py:" in said or dist.get_rank()
    assert not LEDGER
    warned = warning_of(lambda: start(computing(compute, where={}, positions=None, reads=False)))
    assert "leaves tensors in where" in warned or dist.get_rank()
    caches = {"positions": None, "hidden": None}
    equals_one_process(start(computing(_fill_a_cache, **caches)), computing(_fill_a_cache, **caches), steps=1)
    return said


def keep_a_tensor_in_the_loss(plan: str) -> str:
    x, ids = batch().values()
    inputs = (x, ids, torch.ones(len(x), dtype=torch.float64))

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones((), dtype=torch.float64))

        def forward(self, loss: Tensor, target: Tensor) -> Tensor:
            result = (loss * target).mean() / self.mean
            self.mean = result.detach()
            return result

    return refusal(
        lambda: autopar.parallelize(
            net("plain"), cluster(), inputs, loss_fn=Running(), force="tp=2", time_limit_seconds=5, cache=False
        )
    )


def count_in_an_array(plan: str) -> str:
    def compute(model: Any, x: Tensor) -> Any:
        model.steps += 1
        return float(model.steps[0])

    return refusal(lambda: start(computing(compute, steps=numpy.zeros(1))))


@lru_cache(maxsize=8)
def _mask(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


MASKS: dict[int, Tensor] = {}


def memoize(plan: str) -> None:
    """In a cache of functools, a global and an attribute of the class: the capture leaves none of its own tensors there."""

    def compute(model: Any, x: Tensor) -> Any:
        length, kind = int(x.shape[-1]), type(model)
        if length not in MASKS:
            MASKS[length] = _mask(length) * 2
        if kind.mask is None:
            kind.mask = MASKS[length] + 1
        return (kind.mask * _mask(length)).sum()

    for _ in range(2):
        equals_one_process(start(computing(compute)), computing(compute), steps=2)
        MASKS.clear()


def begin_another_way(plan: str) -> str:
    """The first forward computes something else than all others."""

    def compute(model: Any, x: Tensor) -> Any:
        began, model.began = model.began, True
        return x.mean() if began else x.square().mean()

    equals_one_process(start(computing(compute, began=True)), computing(compute, began=True), steps=1)
    return refusal(lambda: start(computing(compute, began=False)))


def train_what_is_no_part(plan: str) -> str:
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    assert "takes a gradient and is no parameter of the model" in refusal(lambda: start(computing(lambda model, x: weight)))
    return refusal(lambda: start(computing(lambda model, x: OUTSIDE(x[..., :1]).mean())))


def read_the_environment(plan: str) -> str:
    return said_at_start(computing(lambda model, x: 2.0 if os.environ.get("AUTOPAR_HABIT") else 1.0), "read_the_environment")


def read_the_clock(plan: str) -> str:
    return said_at_start(computing(lambda model, x: 1.0 + 0.0 * time.time()), "read_the_clock")
