"""Training steps captured as a CUDA graph, beside steps that run: the same losses, and the seconds of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch

import autopar

STEPS, WARM_UP = 12, 4


class Net(torch.nn.Module):
    """Many small kernels, whose launches take longer than they."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(32))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - target).pow(2).mean()


def train(cuda_graph: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = [{"x": torch.randn(32, 64, device=device), "target": torch.randn(32, 64, device=device)} for _ in range(STEPS)]
    parallel = autopar.parallelize(Net(), "local", batches[0], cuda_graph=cuda_graph, cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, laps = [], []
    for batch in batches:
        begin = perf_counter()
        loss = parallel(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        laps.append(perf_counter() - begin)
    graph = parallel.calls.first.graph
    return {"losses": losses, "seconds": median(laps[WARM_UP:]), "captured": graph is not None and graph.replay is not None}


def launched(cuda_graph: bool) -> dict[str, Any]:
    """By a process of its own, on one device."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [*torchrun, __file__, str(int(cuda_graph))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_replays_train_alike() -> None:
    plain, replayed = launched(False), launched(True)
    assert replayed["captured"] and not plain["captured"]
    assert replayed["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    print(f"a step {plain['seconds']:.4f} s, replayed {replayed['seconds']:.4f} s")


def test_the_script_runs() -> None:
    """On any machine, without a graph."""
    assert len(launched(False)["losses"]) == STEPS


if __name__ == "__main__":
    print(json.dumps(train(bool(int(sys.argv[1])))))
