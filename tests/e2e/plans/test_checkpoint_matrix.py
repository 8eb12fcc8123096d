"""A checkpoint of any plan is loaded under any other, bit by bit: parameters, optimizer state, step, random state, extra."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.plans.forced_plans import forced_plan
from torch import Tensor

from autopar.program.build import program_text

PLANS = ("dp=4,zero=3", "tp=4", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,virtual=2,schedule=zbv", "ep=2,dp=2")
MODEL = "deepseek_v3"


def known(parallel: Any, optimizer: torch.optim.Optimizer) -> Any:
    """All that a checkpoint holds, whole, by name."""
    from autopar.runtime.device.rng import seed_stream

    full = parallel.full_optimizer_state(optimizer)
    order = [name for name, _ in parallel.named_parameters()]
    by_name = {order[number]: values for number, values in full["state"].items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in full["param_groups"]]
    return parallel.full_state(), by_name, options, torch.get_rng_state(), random.getstate(), seed_stream.counts()


def differ(one: Any, other: Any, where: str = "") -> list[str]:
    """Where they are not equal bit by bit."""
    if isinstance(one, dict):
        keys = one.keys() ^ other.keys()
        return [f"{where}.{key}" for key in keys] or [
            text for key in one for text in differ(one[key], other[key], f"{where}.{key}")
        ]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [text for i, pair in enumerate(zip(one, other, strict=True)) for text in differ(*pair, f"{where}.{i}")]
    equal = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other
    return [] if equal else [where]


def matrix(texts: list[str], state: dict[str, Tensor], batch: dict[str, Tensor], folder: str) -> list[str]:
    """On a rank: each plan trains and saves, the second half of them asynchronously; then each loads all others'."""
    models, saved, wrong = [], [], []
    for number, text in enumerate(texts):
        parallel = parallel_model(text, state)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01 / (1 + number))
        train(parallel, [batch] * (1 + number % 2), optimizer)
        torch.manual_seed(number), random.seed(number)
        parallel.reseed(number)
        later = parallel.save(f"{folder}/{number}", optimizer, step=number, extra={"epoch": number}, asynchronous=number % 2 == 1)
        saved.append(known(parallel, optimizer))
        if number % 2:
            train(parallel, [batch], optimizer)  # while it is written
        models.append((parallel, optimizer, later))
    for target, (parallel, optimizer, later) in enumerate(models):
        later.wait()
        for source in range(len(texts)):
            found = parallel.load(f"{folder}/{source}", optimizer)
            assert found.step == source and found.extra == {"epoch": source} and parallel.program.mesh.base_seed == source
            wrong += [f"{source} -> {target}: {text}" for text in differ(saved[source], known(parallel, optimizer))]
        train(parallel, [batch], optimizer)  # and goes on
    return wrong


def check(plans: tuple[str, ...], ranks: RankPool, folder: Path) -> None:
    case = prepare(MODEL)
    texts = [program_text((plan := forced_plan(case, force)).graph, plan.candidate) for force in plans]
    for wrong in ranks.run(matrix, texts, case.state, case.batch, str(folder), timeout=60.0 + 30 * len(plans) ** 2):
        assert not wrong, wrong[:20]


def test_between_a_pipeline_and_experts(ranks: RankPool, tmp_path: Path) -> None:
    check(PLANS[4:], ranks, tmp_path)


@pytest.mark.slow
def test_between_all(ranks: RankPool, tmp_path: Path) -> None:
    check(PLANS, ranks, tmp_path)
