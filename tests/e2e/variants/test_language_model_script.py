"""What a small language model's training script does, in a few lines more than on one process: parameter groups, accumulation,
torch's clipping, evaluation, a checkpoint of plain tensors, resumption under another plan, samples by the model's own loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.character_model import CharacterModel
from torch import Tensor

import autopar

ACCUMULATE = 2


def model_of() -> CharacterModel:
    torch.manual_seed(0)
    return CharacterModel().double()


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 32, (8, 9), generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def steps(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    """Losses of two steps, and of an evaluation before each. The script's own code, the same for one process and for ranks."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    source, losses = batches(seed), []
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            losses.append(model(*next(source))[1].item())
        model.train()
        for _ in range(ACCUMULATE):
            _, loss = model(*next(source))
            scaler.scale(loss / ACCUMULATE).backward()
            losses.append(loss.item())
        scaler.unscale_(optimizer)
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return losses


def parallel_of(model: CharacterModel, force: str) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return autopar.parallelize(model, "local:4", next(batches(9)), force=force, cache=False)


def script(first: str, second: str) -> None:
    """On a rank: the training under one plan, and its continuation under another."""
    plain = model_of()
    expected = plain.make_optimizer(0.1, 1e-2)
    parallel = parallel_of(model_of(), first)
    optimizer = parallel.make_optimizer(0.1, 1e-2)
    torch.testing.assert_close(steps(parallel, optimizer, 1), steps(plain, expected, 1), rtol=1e-9, atol=0)
    checkpoint = {"model": parallel.full_state(), "optimizer": parallel.full_optimizer_state(optimizer)}
    torch.testing.assert_close(checkpoint["model"], plain.state_dict(), rtol=1e-9, atol=1e-12)
    ids = next(batches(3))[0][:4, :6]
    torch.manual_seed(7)
    tokens = plain.eval().generate(ids, 6, temperature=0.8, top_k=10)
    torch.manual_seed(7)
    assert torch.equal(parallel.generate(ids, 6, temperature=0.8, top_k=10), tokens)
    assert parallel.training
    resumed = model_of()
    resumed.load_state_dict(checkpoint["model"])
    other = parallel_of(resumed, second)
    optimizer = other.make_optimizer(0.1, 1.0)
    other.load_full_optimizer_state(optimizer, checkpoint["optimizer"])
    torch.testing.assert_close(steps(other, optimizer, 2), steps(plain.train(), expected, 2), rtol=1e-9, atol=0)
    torch.testing.assert_close(other.full_state(), plain.state_dict(), rtol=1e-9, atol=1e-12)


def test_a_script_equals_one_process(ranks: RankPool) -> None:
    ranks.run(script, "dp=2,tp=2", "dp=4,zero=3", timeout=300)


def clipping(plan_of_stages: str) -> None:
    """On a rank: torch's clipping, of a stage's parameters."""
    plain, parallel = model_of(), parallel_of(model_of(), plan_of_stages)
    optimizer, expected = parallel.make_optimizer(0.1, 1e-2), plain.make_optimizer(0.1, 1e-2)
    torch.testing.assert_close(steps(parallel, optimizer, 1), steps(plain, expected, 1), rtol=1e-9, atol=0)
    torch.testing.assert_close(parallel.full_state(), plain.state_dict(), rtol=1e-9, atol=1e-12)


def test_clipping_by_torch_counts_all_stages(ranks: RankPool) -> None:
    ranks.run(clipping, "pp=2,dp=2", timeout=300)


@pytest.mark.slow
def test_a_script_of_the_free_choice(ranks: RankPool) -> None:
    ranks.run(script, "pp=1", "dp=2,tp=2,zero=1", timeout=300)
