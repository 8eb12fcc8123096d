"""Habits around the model's faces: attributes, copies, logs (docs/habits.md), on real ranks."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.harness.habits import (
    OTHER_PLANS,
    check,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    rows_of,
)
from support.harness.rank_pool import RankPool
from support.models.habit_model import WIDTH, net

import autopar


def read_the_plan(plan: str) -> None:
    assert parallel_of(net(), plan).plan == autopar.Plan.from_json(Path(plan).read_text())


@of("dropout")
def draw_random_numbers(plan: str) -> None:
    model = net("dropout")
    torch.manual_seed(3 + dist.get_rank())
    random.seed(3)
    before = (torch.get_rng_state(), random.getstate())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def read_attributes(plan: str) -> None:
    parallel, model = parallel_of(net(), plan), net()
    assert parallel.config == model.config and parallel.config.width == WIDTH
    assert parallel.parameter_count() == model.parameter_count()
    with pytest.raises(AttributeError, match="has an attribute 'nothing'"):
        parallel.nothing  # noqa: B018


def free_the_plain_model(plan: str) -> None:
    model = net()
    parallel, seen = parallel_of(model, plan), weakref.ref(model.words.weight)
    del model
    gc.collect()
    assert seen() is None
    equals_one_process(parallel, net())


# -- here


@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], force, ranks, tmp_path)
