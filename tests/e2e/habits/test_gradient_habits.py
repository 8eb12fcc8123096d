"""Habits around gradients: frozen parameters, hooks, clipping, accumulation (docs/habits.md), on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.harness.comparison import training_differences
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
from support.harness.training_loop import adamw, train
from support.models.habit_model import batch, net
from torch import nn

import autopar


@of("frozen 0")
def frozen_before(plan: str) -> None:
    models = [net(), net()]
    for model in models:
        model.layers[0].requires_grad_(False)
    equals_one_process(parallel_of(models[0], plan), models[1])


def frozen_later(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    names = [name for name, _ in reference.named_parameters() if name.startswith("layers.0")]

    def freeze(model: nn.Module) -> Callable[[int], None]:
        own = dict(model.named_parameters())
        return lambda index: [own[name].requires_grad_(False) for name in names if name in own] and None if index == 0 else None

    batches = [batch(seed) for seed in range(3)]
    found = train(parallel, batches, adamw(), after_step=freeze(parallel))
    expected = train(reference, batches, adamw(), after_step=freeze(reference))
    state = {name: tensor for name, tensor in found.state.items() if name in expected.state}
    assert not (wrong := training_differences(found._replace(state=state), expected)), wrong[:3]


def frozen_later_on_the_plain_model(plan: str) -> str:
    model = net()
    parallel = parallel_of(model, plan)
    one_step(parallel)
    model.words.requires_grad_(False)
    return refusal(lambda: parallel(**batch()))


@of("frozen 0 1")
def unfrozen_later(plan: str) -> str:
    model = net()
    model.layers.requires_grad_(False)
    parallel = parallel_of(model, plan)
    for name, parameter in parallel.named_parameters():
        if name.startswith("layers."):
            parameter.requires_grad_(True)
    return refusal(lambda: parallel(**batch()))


def noop(*args: Any) -> None:
    """A hook."""


def hook_of_a_module(plan: str) -> str:
    model = net()
    model.layers[1].up.register_forward_hook(noop)
    said = warning_of(lambda: autopar.parallelize(model, "local:4", batch(), plan=plan))
    assert dist.get_rank() or "layers.1.up" in said
    return said if dist.get_rank() == 0 else ROWS["hook_of_a_module"][1]


def hook_of_a_part(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    part = next(module for name, module in parallel.named_modules() if name.startswith("layers."))
    return refusal(lambda: part.register_forward_hook(noop))


def hook_of_a_parameter(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    for parameter in parallel.parameters():
        parameter.register_hook(noop)
    return refusal(lambda: parallel(**batch()))


# -- here


@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit(habit: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], "dp=2,tp=2", ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("force", OTHER_PLANS)
@pytest.mark.parametrize("habit", rows_of(globals()))
def test_habit_under_other_plans(habit: str, force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(globals()[habit], force, ranks, tmp_path)
