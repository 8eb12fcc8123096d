"""A job under torchrun whose ranks are killed at random moments, also while a checkpoint is written, and whose number of
processes changes: it goes on by itself, and ends with the losses and the parameters of one process that was never interrupted."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from support.elastic_job import ForkedJob, Killer, check_job
from support.harness.rank_pool import RankPool

from autopar.plan_inputs import plan_folder


def kill_twice(job: Any, steps: int) -> None:
    killer = Killer(job, 0, 2)
    killer.kill("in a step")
    killer.kill("saving")
    assert job.wait(120.0) == [0]
    assert len(job.starts()) == 3
    check_job(job, steps)


def test_two_kills(ranks: RankPool, tmp_path: Path) -> None:
    """The second while a checkpoint is written. Without torchrun, on forked ranks."""
    job = ForkedJob(ranks.template, tmp_path, 2, ["--steps", "30", "--every", "5", "--dtype", "float64"])
    try:
        job.begin()
        kill_twice(job, 30)
    finally:
        job.close()


@pytest.mark.slow
def test_two_kills_under_torchrun(jobs: Any) -> None:
    """The second while a checkpoint is written."""
    job = jobs(1, 2, 40)
    job.start(0)
    kill_twice(job, 40)


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
    check_job(job, 340)


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
    check_job(job, 60)


@pytest.mark.slow
def test_planned_for_before_it_comes(jobs: Any) -> None:
    """``--expect``: the job on one process finds the plan that was made beside the job on two."""
    folder = plan_folder()
    assert folder is not None
    shutil.rmtree(folder, ignore_errors=True)
    job = jobs(1, 2, 400)
    job.words = [*job.words, "--expect", "local:1"]
    job.start(0)
    job.wait_for(lambda: len(list(folder.glob("*.json"))) == 2, 200.0, "second plan")
    job.agents[0].send_signal(signal.SIGUSR1)
    job.wait(60.0)
    job.ranks = 1
    job.words = [word for word in job.words if word not in ("--expect", "local:1")]
    times = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    job.start(0)
    job.wait_for(lambda: len(job.starts()) == 2, 120.0, "start on one process")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == times
