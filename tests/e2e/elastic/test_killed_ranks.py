"""A job under torchrun whose ranks are killed at random moments, also while a checkpoint is written, and whose number of processes
changes: it goes on by itself, and ends with the losses and the parameters of one process that was never interrupted."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from support.harness.elastic_job import SCRIPT, ElasticJob, Killer

import autopar

EVERY = 5


@cache
def example() -> Any:
    """`examples/elastic.py` as a module."""
    spec = importlib.util.spec_from_file_location("elastic_example", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def uninterrupted(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one process, and its parameters at the end."""
    model = example().make_model(torch.float64)
    optimizer, text, losses = example().make_optimizer(model), example().corpus(), []
    for step in range(steps):
        loss = model(**example().global_batch(text, 1, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def check(job: ElasticJob, steps: int) -> None:
    """Every loss that was computed, also in what was lost again, and what was saved last."""
    losses, state = uninterrupted(steps)
    computed = job.losses()
    assert {step for step, _ in computed} == set(range(steps))
    worst = max(abs(loss - losses[step]) / abs(losses[step]) for step, loss in computed)
    assert worst < 1e-9, worst
    model = example().make_model(torch.float64)
    found = autopar.load_checkpoint(job.checkpoints, model, example().make_optimizer(model))
    assert found is not None and found.step == steps
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
    left = sorted(path.name for path in job.checkpoints.iterdir())
    assert len(left) <= 3 and not any(name.endswith((".tmp", ".old")) for name in left), left


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Makes jobs, of which nothing is left."""
    made: list[ElasticJob] = []

    def make(nodes: int, ranks: int, steps: int, **options: Any) -> ElasticJob:
        words = ["--steps", str(steps), "--every", str(EVERY), "--dtype", "float64"]
        made.append(ElasticJob(tmp_path, nodes, ranks, words, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


def test_two_kills(jobs: Any) -> None:
    """The second while a checkpoint is written."""
    job = jobs(1, 2, 40)
    job.start(0)
    killer = Killer(job, 0, 2)
    killer.kill("in a step")
    killer.kill("saving")
    assert job.wait(120.0) == [0]
    assert len(job.starts()) == 3
    check(job, 40)


@pytest.mark.slow
def test_twenty_kills_and_other_numbers_of_processes(jobs: Any) -> None:
    """4 processes on two nodes; the second is lost, and comes again."""
    job = jobs(2, 2, 340)
    job.start(0)
    job.start(1)
    killer = Killer(job, 1, 4)
    moments = ["in a step", "saving", "starting", "saving"]
    worlds = []
    for number in range(20):
        if number == 7:
            killer.killed |= set(job.workers())
            job.lose(1)
            killer.ranks = 2
        if number == 14:
            killer.killed |= set(job.workers())
            job.start(1)
            killer.ranks = 4
        killer.kill(moments[number % 4])
        worlds.append(killer.ranks)
    assert job.wait(240.0) == [0, 0]
    assert worlds == [4] * 7 + [2] * 7 + [4] * 6
    check(job, 340)


@pytest.mark.slow
def test_a_signal_saves_and_ends(jobs: Any) -> None:
    """As Slurm sends one before the time limit; the next job goes on at that step."""
    job = jobs(1, 2, 60)
    job.start(0)
    job.wait_for(lambda: len(job.losses()) > 7, 120.0, "steps")
    job.agents[0].send_signal(signal.SIGUSR1)
    job.wait(60.0)
    sleep(0.1)
    done = len(job.losses())
    saved = max(int(path.name[5:]) for path in job.checkpoints.glob("step_*"))
    assert saved == done < 60, (saved, done)
    job.start(0)
    assert job.wait(120.0) == [0]
    assert job.starts() == [0, done] and len(job.losses()) == 60
    check(job, 60)
