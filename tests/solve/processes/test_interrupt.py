"""Ctrl-C ends a solve of any size: OR-tools drops an exception that is raised while its results are made Python objects."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from time import monotonic

import pytest

from autopar.solve.ilp.linear_model import LinearModel
from autopar.solve.ilp.solver import solve


@pytest.fixture
def alarm() -> Iterator[None]:
    """An alarm does what Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def _knapsack(size: int) -> LinearModel:
    draw = random.Random(size)
    model = LinearModel()
    columns = [model.binary() for _ in range(size)]
    model.minimise({column: -draw.uniform(1, 2) for column in columns})
    model.row([(column, draw.uniform(1, 2)) for column in columns], lower=0.0, upper=size / 3)
    return model


def _solves_until_interrupted(model: LinearModel, seconds: float) -> None:
    began = monotonic()
    while monotonic() - began < seconds:
        solve(model)


@pytest.mark.parametrize("size", [5, 60])
def test_no_interrupt_is_lost(size: int, alarm: None) -> None:
    model = _knapsack(size)
    for number in range(40):
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0007 * number)
            _solves_until_interrupted(model, 1.0)
