"""`shut_down` ends what was started, and comes back: what stands after it runs, and the exit status is the script's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

SCRIPT = """
import os, sys, threading, time
import torch, autopar
import torch.distributed as dist
from autopar.runtime.device.mesh import shut_down
torch.set_num_threads(1)
torch.manual_seed(0)
rank = int(os.environ["RANK"])

def main():
    parallel = autopar.parallelize(torch.nn.Linear(8, 8), "local", (torch.randn(4, 8),), patience_seconds=3.0, force="dp=2")
    parallel(torch.randn(4, 8)).sum().backward()
    try:
        if sys.argv[1] == "fails" and rank == 1:
            raise ValueError("mine")
        shut_down()
        shut_down()  # nothing is left to end
        assert not dist.is_initialized()
        time.sleep(4.0 * rank)  # longer than the patience: the others are gone, and nobody minds
        print("after", flush=True)
    finally:
        shut_down()
        print("finally", flush=True)
    watching = [each.name for each in threading.enumerate() if "heartbeat" in each.name or "judge" in each.name]
    assert not watching, watching
    sys.exit(3)

main()
"""


def test_the_script_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for each in launch(ranks, tmp_path / "script.py", 2, "ends"):
        assert (each.status, each.stdout) == (3, "after\nfinally\n"), each.stderr


def test_an_exception_waits_for_nobody(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    first, second = launch(ranks, tmp_path / "script.py", 2, "fails")
    assert second.status == 1 and second.stdout == "finally\n" and "ValueError: mine" in second.stderr
    assert first.status and "after" not in first.stdout


def test_without_a_process_group(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.runtime.device.mesh import shut_down

    shut_down()
    print("here")
    assert capsys.readouterr().out == "here\n"
