"""Habits around optimizers (docs/habits.md), on real ranks."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.harness.habits import (
    OTHER_PLANS,
    check,
    equals_one_process,
    one_step,
    parallel_of,
    refusal,
    rows_of,
)
from support.harness.rank_pool import RankPool
from support.models.habit_model import batch, net
from torch import Tensor


def optimizer_after(plan: str) -> None:
    equals_one_process(parallel_of(net(), plan), net())


def optimizer_before(plan: str) -> str:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    said = refusal(optimizer.step)
    del parallel
    gc.collect()
    optimizer.step()  # the hook is gone with the parallel model
    return said


def optimizer_before_with_closure(plan: str) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = parallel_of(model, plan)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = parallel(**batch())
        loss.backward()
        return loss

    return refusal(lambda: optimizer.step(closure))


def plain_model_beside(plan: str) -> None:
    model = net()
    equals_one_process(parallel_of(model, plan), model)


# -- here


@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], force, ranks, tmp_path)
