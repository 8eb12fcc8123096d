"""The examples, as a user starts them, and launches that go wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """One thread a process."""
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )


def test_quickstart() -> None:
    done = run(*TORCHRUN, "--nproc-per-node", "4", "examples/quickstart.py")
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.slow  # .ci/run runs it as `make demo-short`
def test_the_demo_in_short() -> None:
    """It compares the losses itself, and fails where they differ."""
    done = run(sys.executable, "examples/train_gpt.py", "--short")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "relative difference" in done.stdout and "predicted" in done.stdout


def test_the_wrong_number_of_processes_is_one_clear_line() -> None:
    done = run(*TORCHRUN, "--nproc-per-node", "2", "examples/quickstart.py")
    assert done.returncode != 0
    assert "local:4 has 4 devices but 2 processes were launched: use torchrun --nproc-per-node 4" in done.stderr
