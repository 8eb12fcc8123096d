"""Habits around saving and loading (docs/habits.md), on real ranks."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from support.harness.habits import (
    OTHER_PLANS,
    check,
    parallel_of,
    refusal,
    rows_of,
    warning_of,
)
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, train
from support.models.habit_model import batch, net
from torch import nn


def save_state_dict(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    assert not warning_of(lambda: copy.deepcopy(parallel.state_dict()))
    return warning_of(lambda: torch.save({"model": parallel.state_dict(), "step": 3}, io.BytesIO()))


def save_full_state(plan: str) -> None:
    parallel, reference, fresh = parallel_of(net(), plan), net(), net("")
    for parameter in fresh.parameters():
        nn.init.ones_(parameter)
    for model in (parallel, reference):
        train(model, [batch()], adamw())
    state = parallel.full_state()
    file = io.BytesIO()
    torch.save(state, file)
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for name, parameter in fresh.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name))
    assert "scale" not in parallel.state_dict() and state["head.weight"] is state["words.weight"]


def load_plain_state_dict(plan: str) -> None:
    model = net()
    parallel = parallel_of(net(), plan)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    parallel.load_state_dict(model.state_dict())
    torch.testing.assert_close(parallel(**batch()).detach(), model(**batch()).detach())
    torch.testing.assert_close(parallel.full_state()["unused"], model.unused.detach())
    assert "misses unused" in refusal(lambda: parallel.load_state_dict({"head.weight": model.head.weight}))


def save_optimizer_state(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    mine = adamw()(parallel)
    train(parallel, [batch()], mine)
    train(reference, [batch()], adamw())
    state = parallel.full_optimizer_state(mine)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1.0)
    theirs.load_state_dict(state)
    found = train(parallel, [batch(1)], mine).state
    expected = train(reference, [batch(1)], theirs).state
    for name in expected:
        if name in found:
            torch.testing.assert_close(found[name], expected[name])


# -- here


@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], force, ranks, tmp_path)
