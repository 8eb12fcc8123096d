"""Habits around train() and eval() (docs/habits.md), on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.harness.habits import (
    OTHER_PLANS,
    ROWS,
    check,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    refusal,
    rows_of,
    warning_of,
)
from support.harness.rank_pool import RankPool
from support.models.habit_model import batch, net

import autopar


@of("dropout eval")
def model_in_eval_mode(plan: str) -> str:
    model = net("dropout").eval()
    said = warning_of(lambda: autopar.parallelize(model, "local:4", batch(), plan=plan))
    return said if dist.get_rank() == 0 else ROWS["model_in_eval_mode"][1]


@of("dropout eval")
def train_after_eval_mode(plan: str) -> str:
    parallel, reference = parallel_of(net("dropout").eval(), plan), net("dropout").eval()
    assert not parallel.training
    with torch.no_grad():
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
    return refusal(parallel.train)


@of("eval")
def train_without_dropout(plan: str) -> None:
    equals_one_process(parallel_of(net().eval(), plan).train(), net())


@of("dropout")
def eval_with_dropout(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout"), plan), net("dropout")
    with torch.no_grad():
        in_training = parallel(**batch())
        for model in (parallel, reference):
            model.eval()
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
        parallel.train()
        assert abs(parallel(**batch()) - reference(**batch())) > 1e-4 < abs(in_training - reference(**batch()))


def refused_in_eval(kind: str, plan: str) -> str:
    parallel = parallel_of(net(kind), plan)
    one_step(parallel)
    parallel.eval()
    said = refusal(lambda: parallel(**batch()))
    parallel.train()
    one_step(parallel)
    return said


@of("branch")
def eval_with_branch(plan: str) -> str:
    return refused_in_eval("branch", plan)


@of("constant_dropout")
def eval_with_constant_dropout(plan: str) -> str:
    return refused_in_eval("constant_dropout", plan)


@of("batch_norm")
def eval_with_batch_norm(plan: str) -> str:
    return refused_in_eval("batch_norm", plan)


# -- here


@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], force, ranks, tmp_path)
