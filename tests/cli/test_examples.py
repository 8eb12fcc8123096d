"""The examples, as a user starts them, and launches that go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """One thread a process."""
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )


def falls(text: str) -> bool:
    """Five losses, the last below the first."""
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    return len(losses) == 5 and losses[-1] < losses[0]


def test_quickstart(ranks: RankPool) -> None:
    first, *others = launch(ranks, ROOT / "examples" / "quickstart.py", 4)
    assert not any(each.status for each in (first, *others)), first.stderr[-4000:]
    assert falls(first.stdout)


@pytest.mark.slow
def test_quickstart_by_torchrun() -> None:
    done = run(*TORCHRUN, "--nproc-per-node", "4", "examples/quickstart.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert falls(done.stdout)


@pytest.mark.slow  # .ci/run runs it as `make demo-short`
def test_the_demo_in_short() -> None:
    """It compares the losses itself, and fails where they differ."""
    done = run(sys.executable, "examples/train_gpt.py", "--short")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "relative difference" in done.stdout and "predicted" in done.stdout


def test_the_wrong_number_of_processes_is_one_clear_line(ranks: RankPool) -> None:
    for ended in launch(ranks, ROOT / "examples" / "quickstart.py", 2):
        assert ended.status
        assert "local:4 has 4 devices but 2 processes were launched: use torchrun --nproc-per-node 4" in ended.stderr
