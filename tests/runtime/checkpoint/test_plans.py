"""Checkpoints move between all plans and numbers of processes, and to one process, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from support.models.handwritten_program import batch, make, model
from torch import Tensor

from autopar.runtime.checkpoint.entry import load_checkpoint
from autopar.runtime.parallel import Parallel

State = dict[str, Tensor]
PLANS = [({"dp": 4}, 0), ({"dp": 4}, 3), ({"tp": 4}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 4, "state": 2}, 3)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


def known(parallel: Any, optimizer: torch.optim.Optimizer) -> Any:
    """All that a checkpoint holds, whole."""
    from autopar.runtime.device.rng import seed_stream

    drawn = torch.get_rng_state(), random.getstate(), seed_stream.counts()
    by_name = {name: state_of(parallel, optimizer, name) for name, _ in parallel.named_parameters()}
    return parallel.full_state(), by_name, drawn, parallel.full_optimizer_state(optimizer)["param_groups"]


def state_of(parallel: Any, optimizer: torch.optim.Optimizer, name: str) -> State:
    """Whole, of a parameter of this rank."""
    parameter = parallel.state.parameters[name]
    found = optimizer.state[parameter].items()
    return {key: parallel.state.full(name, value) if hasattr(value, "to_local") else value.clone() for key, value in found}


def save(axes: dict[str, int], zero: int, state: State, folder: str) -> Any:
    parallel = Parallel(make(axes, zero), state)
    optimizer = adamw(parallel.parameters())
    train(parallel, [batch(seed) for seed in range(2)], optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule.step()
    torch.manual_seed(5), random.seed(5)
    extra = {"schedule": schedule.state_dict(), "epoch": 3}
    assert parallel.save(folder, optimizer, step=2, extra=extra).wait() == Path(folder) / "step_00000002"
    return known(parallel, optimizer)


def resume(axes: dict[str, int], zero: int, state: State, folder: str) -> Any:
    parallel = Parallel(make(axes, zero), {name: torch.zeros_like(value) for name, value in state.items()})
    optimizer = adamw(parallel.parameters())
    torch.manual_seed(99), random.seed(99)
    found = parallel.load(folder, optimizer)
    assert found is not None and found.step == 2 and found.extra["epoch"] == 3
    torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5).load_state_dict(found.extra["schedule"])
    return known(parallel, optimizer)


def same(one: Any, other: Any, where: str = "") -> list[str]:
    """Where they are not equal bit by bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        return [text for key in one for text in same(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        return [text for i, pair in enumerate(zip(one, other, strict=True)) for text in same(*pair, f"{where}.{i}")]
    equal = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other
    return [] if equal else [where]


@pytest.mark.parametrize("before", [PLANS[3], *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS)])
def test_to_other_plans_and_to_one_process(ranks: RankPool, tmp_path: Path, before: Any) -> None:
    state = {name: value.clone() for name, value in model().state_dict().items() if name != "head.weight"}
    saved = ranks.run(save, *before, state, str(tmp_path))
    for after in PLANS:
        for mine, resumed in zip(saved, ranks.run(resume, *after, state, str(tmp_path)), strict=True):
            assert same(mine, resumed) == [], after
    for axes in ({"dp": 2}, {"tp": 2}):  # fewer processes
        for mine, resumed in zip(saved, ranks.run(resume, axes, 1, state, str(tmp_path), world=2), strict=False):
            assert same(mine, resumed) == [], axes
    plain = model()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.zero_()
    optimizer = adamw(plain.parameters())
    found = load_checkpoint(tmp_path, plain, optimizer)
    assert found is not None and found.step == 2
    assert same(dict(plain.state_dict()) | saved[0][0], dict(plain.state_dict())) == []
    for name, parameter in plain.named_parameters():
        assert same(saved[0][1][name], optimizer.state[parameter]) == [], name
    assert torch.equal(torch.get_rng_state(), saved[0][2][0]) and random.getstate() == saved[0][2][1]
