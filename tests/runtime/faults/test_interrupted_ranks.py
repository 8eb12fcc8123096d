"""Ctrl-C in the terminal of a run: every rank gets it, and says one line."""

from __future__ import annotations

from pathlib import Path

from support.harness.launch import launch
from support.harness.rank_pool import RankPool

SCRIPT = """
import os, signal, threading, time
import torch, autopar
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would their ranks
torch.set_num_threads(1)
torch.manual_seed(0)
batch = (torch.randn(8, 8),)
parallel = autopar.parallelize(torch.nn.Linear(8, 8), "local", batch, force="dp=4")

def terminal():
    while not os.path.exists("go"):
        time.sleep(0.01)
    while signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # from when the rank has said its line
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(3000):  # one that Python loses in a callback is given again
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
                break
            time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)  # torchrun sends it once more

threading.Thread(target=terminal, daemon=True).start()
for step in range(10**6):
    parallel(*batch).sum().backward()
    if step == 3 and os.environ["RANK"] == "0":
        open("go", "w").close()
"""


def test_one_line_of_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for rank, each in enumerate(launch(ranks, tmp_path / "script.py", 4)):
        lines = [line for line in each.stderr.splitlines() if line.strip()]
        assert len(lines) <= 1, each.stderr
        assert each.status and f"rank {rank} (dp={rank}): interrupted " in lines[0], each.stderr
