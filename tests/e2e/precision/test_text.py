"""bf16 and fp16 compute over float32 parameters on the standard library's text: the losses follow those of the single process in
float32. fp16 has a `GradScaler`."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.character_model import CharacterModel
from torch import Tensor

import autopar

LENGTH, BATCH = 32, 16
BOUND = {"bf16": 0.005, "fp16": 0.005}
"""The largest difference of the mean loss over ten steps, relative; see docs/precision.md."""
EACH = {"bf16": 0.02, "fp16": 0.02}
"""The same of one step."""


@functools.cache
def text() -> Tensor:
    data = b"".join(Path(module.__file__).read_bytes() for module in (functools, json))
    return torch.tensor(list(data), dtype=torch.long)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text()) - LENGTH - 1, (BATCH,), generator=generator)
    rows = torch.stack([text()[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def model_of() -> CharacterModel:
    torch.manual_seed(0)
    return CharacterModel(words=256, width=32, heads=4, layers=2, block_size=LENGTH)


def losses_of(model: Any, steps: int, *, scaled: bool) -> list[float]:
    optimizer = model.make_optimizer(0.1, 3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**12, growth_interval=50)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        _, loss = model(*batch(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


def script(force: str, precision: str, steps: int, expected: list[float], world: int) -> float:
    """The largest difference of a mean over ten steps."""
    with warnings.catch_warnings(action="ignore"):
        parallel = autopar.parallelize(
            model_of(), f"local:{world}", batch(0), precision=precision, force=force, cache=False
        )  # fmt: skip
    found = losses_of(parallel, steps, scaled=precision == "fp16")
    assert {parameter.dtype for parameter in parallel.parameters()} == {torch.float32}, "masters"
    means = [[sum(each[first : first + 10]) / 10 for first in range(0, steps, 10)] for each in (found, expected)]
    far = max(abs(one - other) / other for one, other in zip(*means, strict=True))
    worst = max(abs(one - other) / other for one, other in zip(found, expected, strict=True))
    assert far < BOUND[precision] and worst < EACH[precision], (force, precision, far, worst, means)
    assert found != expected, "it rounds"
    return far


def follow(ranks: RankPool, cases: list[tuple[str, str, int]], steps: int) -> None:
    expected = losses_of(model_of(), steps, scaled=False)
    assert expected[-1] < expected[0] - 0.2
    for force, precision, world in cases:
        found = ranks.run(script, force, precision, steps, expected, world, world=world, timeout=380)
        assert len(set(found)) == 1, "equal on all ranks"
        print(force, precision, world, found[0])


def test_a_few_steps_follow_float32(ranks: RankPool) -> None:
    follow(ranks, [("dp=2,zero=3", "bf16", 2), ("pp=2", "fp16", 2)], 20)


CASES = [
    ("dp=2,zero=3", 2), ("tp=2", 2), ("dp=4,zero=3", 4), ("dp=2,tp=2", 4), ("pp=2,dp=2", 4), ("tp=4", 4),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_200_steps_follow_float32(precision: str, ranks: RankPool) -> None:
    follow(ranks, [(force, precision, world) for force, world in CASES], 200)
