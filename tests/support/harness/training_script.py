"""Unusual training loops as data: the same script runs on one process and on the ranks of a pipeline.

| instruction | |
|---|---|
| ``("zero", to_none)`` | ``optimizer.zero_grad(set_to_none=to_none)`` |
| ``("loss", key, index, factor)`` | ``losses[key] = model(**batches[index]) * factor``, whose number is noted |
| ``("backward", key)`` | ``losses.pop(key).backward()`` |
| ``("gradients",)`` | notes all gradients |
| ``("clip", norm, kind)`` | ``clip_grad_norm_``, whose result is noted |
| ``("step",)`` | ``optimizer.step()`` |
| ``("look", index)`` | notes the loss without gradients |
| ``("train", mode)`` | ``model.train(mode)`` |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.verification.single import LiftCasts
from support.harness.comparison import NOISE, different_numbers, different_tensors
from support.harness.rank_pool import RankPool
from support.harness.training_loop import Tensors, clip_gradients, full_gradients, full_state, loss_of, parallel_model
from support.models.small_models import make

Script = Sequence[tuple[Any, ...]]
Batch = dict[str, Tensor]


class Record(NamedTuple):
    """Losses and norms, gradients that were noted, and the full state at the end."""

    numbers: list[float]
    gradients: list[Tensors]
    state: Tensors


STEP: Script = (("zero", True), ("loss", 0, 0, 1.0), ("backward", 0), ("gradients",), ("step",))


def steps(count: int, first: int = 0) -> Script:
    """Plain ones, each on a batch of its own."""
    return [word if word[0] != "loss" else ("loss", 0, first + index, 1.0) for index in range(count) for word in STEP]


def play(model: nn.Module, script: Script, batches: Sequence[Batch], rate: float = 1e-2) -> tuple[list[float], list[Tensors]]:
    """The numbers and the gradients that the script notes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses: dict[Any, Tensor] = {}
    numbers: list[float] = []
    noted: list[Tensors] = []
    for word, *given in script:
        if word == "zero":
            optimizer.zero_grad(set_to_none=given[0])
        elif word == "loss":
            losses[given[0]] = loss_of(model(**batches[given[1]])) * given[2]
            numbers.append(losses[given[0]].item())
        elif word == "backward":
            losses.pop(given[0]).backward()
        elif word == "gradients":
            noted.append({name: gradient.clone() for name, gradient in full_gradients(model).items()})
        elif word == "clip":
            numbers.append(clip_gradients(model, *given).item())
        elif word == "step":
            optimizer.step()
        elif word == "look":
            with torch.no_grad():
                numbers.append(loss_of(model(**batches[given[0]])).item())
        else:
            assert word == "train", word
            model.train(*given)
    return numbers, noted


def on_one_process(model: nn.Module, script: Script, batches: Sequence[Batch]) -> Record:
    """What the script does to a model of PyTorch, or on a rank to a parallel one."""
    numbers, gradients = play(model, script, batches)
    return Record(numbers, gradients, full_state(model))


def on_ranks(jobs: Sequence[tuple[str, dict[str, Tensor], Script, Sequence[Batch], dict[str, Any]]]) -> list[Record]:
    """On a rank: each job's script, as (text, state, script, batches, options of `Parallel`)."""
    return [on_one_process(parallel_model(text, state, **options), *job) for text, state, *job, options in jobs]


def record_differences(found: Record, expected: Record, tolerance: float = 1e-9) -> list[str]:
    """What differs by more than `tolerance`, relative to each tensor's largest value (gradients: see `NOISE`). A rank of a
    pipeline may lack some state."""
    out = different_numbers("number", found.numbers, expected.numbers, tolerance)
    for index, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        out += different_tensors(f"gradient {index}", mine, theirs, tolerance, noise=NOISE)
    wanted = {name: tensor for name, tensor in expected.state.items() if name in found.state}
    return out + different_tensors("state", found.state, wanted, tolerance)


class Job(NamedTuple):
    """A program, what it is to do, and what one process makes of it."""

    name: str
    text: str
    state: dict[str, Tensor]
    script: Script
    batches: list[Batch]
    expected: Record
    options: dict[str, Any] = {}


def batches(batch: Batch, count: int = 4) -> list[Batch]:
    """All different."""
    return [{name: tensor.roll(step, 0).roll(step, -1) for name, tensor in batch.items()} for step in range(count)]


@cache
def three_steps(name: str) -> Record:
    """What one process makes of three steps."""
    model, batch = make(name, torch.float64, 16)
    with LiftCasts():
        return on_one_process(model, steps(3), batches(batch))


def check_jobs(jobs: list[Job], ranks: RankPool, world: int, tolerance: float = 1e-9) -> None:
    """All on one pool of processes."""
    told = ranks.run(on_ranks, [(job.text, job.state, job.script, job.batches, job.options) for job in jobs], world=world,
                     timeout=60.0 + 10 * len(jobs))  # fmt: skip
    wrong = [
        f"{job.name}, rank {rank}: {text}"
        for rank, records in enumerate(told)
        for job, found in zip(jobs, records, strict=True)
        for text in record_differences(found, job.expected, tolerance)
    ]
    assert not wrong, "\n".join(wrong[:20])
