"""The rows of docs/habits.md, and what runs one on ranks under a plan.

A habit is a function of a test module, named as its row, that runs on every rank with the path of a plan, or with what is
forced if its argument is called so. A row that is *right* gives None, and asserts that the parallel model equals one process;
one that is *refused* or *warned* gives what was said.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import autopar
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, train
from support.models.habit_model import batch, net_of

PAGE = Path(__file__).parents[3] / "docs" / "habits.md"
ROWS = {
    match[1]: (match[2], match[3] or "")
    for match in re.finditer(r"^\| `(\w+)` \|.*\| (right|refused|warned)(?:: `(.*)`)? \|$", PAGE.read_text(), re.MULTILINE)
}
QUICK_PLANS = ("dp=2,tp=1,zero=3", "tp=2,dp=1")
OTHER_PLANS = (*QUICK_PLANS, "dp=2,tp=2", "dp=4,zero=3", "pp=2,dp=2", "")
Habit = Callable[[str], Any]


def of(kind: str) -> Callable[[Habit], Habit]:
    """The model whose plan a habit needs, see `net_of`."""

    def mark(habit: Habit) -> Habit:
        habit.kind = kind  # type: ignore[attr-defined]
        return habit

    return mark


def under(plan: str) -> Callable[[Habit], Habit]:
    """The plan of a habit in `make test`, where it cannot be either of the two."""

    def mark(habit: Habit) -> Habit:
        habit.plan = plan  # type: ignore[attr-defined]
        return habit

    return mark


def rows_of(module: Mapping[str, Any]) -> list[Any]:
    """The rows of the page whose habits are in a module's ``globals()``."""
    return [name for name in ROWS if callable(module.get(name))]


# -- on a rank


def cluster() -> str:
    """That of the ranks."""
    return f"local:{dist.get_world_size()}"


def parallel_of(model: nn.Module, plan: str | None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autopar.parallelize(model, cluster(), batch(), plan=plan, **options)


def equals_one_process(parallel: Any, reference: nn.Module, steps: int = 3, **options: Any) -> None:
    """Losses, gradients and state of the same steps."""
    batches = [batch(seed) for seed in range(steps)]
    found, expected = train(parallel, batches, adamw(), **options), train(reference, batches, adamw(), **options)
    trained = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=trained), expected)), wrong[:3]


def refusal(do: Callable[[], Any]) -> str:
    """What the error says that `do` raises."""
    try:
        do()
    except autopar.AutoparError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("not refused")


def warning_of(do: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    return " ".join(str(each.message) for each in caught)


def one_step(parallel: Any, **given: Any) -> None:
    parallel(**(given or batch())).backward()


# -- here


@cache
def plan_of(kind: str, force: str) -> str:
    """The plan as text."""
    return autopar.plan(net_of(kind), f"local:{ranks_of(force)}", batch(), force=force).to_json()


def ranks_of(force: str) -> int:
    return 2 if force in QUICK_PLANS else 4


def quick_plan(habit: Habit) -> str:
    """One of two ranks, the same for a habit in every run."""
    return QUICK_PLANS[zlib.crc32(habit.__name__.encode()) % len(QUICK_PLANS)]


def check(habit: Habit, force: str, ranks: RankPool, folder: Path) -> None:
    answer, line = ROWS[habit.__name__]
    for said in _answers(habit, force, ranks, folder):
        assert said is None if answer == "right" else line in said, said


def _answers(habit: Habit, force: str, ranks: RankPool, folder: Path) -> list[Any]:
    if "force" in signature(habit).parameters:
        return ranks.run(habit, force, world=ranks_of(force), timeout=300)
    path = folder / "plan.json"
    kind = getattr(habit, "kind", "")
    if kind == "batch_norm" and "pp=" in force:
        assert "takes several micro-batches" in refusal(lambda: plan_of(kind, force))
        return []
    path.write_text(plan_of(kind, force))
    return ranks.run(habit, str(path), world=ranks_of(force))


# -- the tests of every module of habits, which imports them; tests/e2e/habits/conftest.py has the parameters


def test_habit(habit: str, request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path) -> None:
    function = getattr(request.module, habit)
    check(function, getattr(function, "plan", "") or quick_plan(function), ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
def test_habit_under_other_plans(
    habit: str, force: str, request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path
) -> None:
    check(getattr(request.module, habit), force, ranks, tmp_path)
