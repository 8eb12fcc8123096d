"""An exported folder trains without autopar and prints the losses of the program that it came from."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.blocks import gpt2_graph
from support.candidates import drawn_candidate, mesh_of
from support.interpret import make_state, run_graph
from support.launch import launch
from support.ranks import Ranks
from support.replays import with_replays

from autopar.passes.pipeline import lower
from autopar.program.export import export, global_inputs, random_batch
from autopar.program.source import render

BLOCKED = "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
BLOCKED += "        if name.split('.')[0] == 'autopar': raise ImportError('autopar is blocked')\nsys.meta_path.insert(0, No())\n"


def torchrun(folder: Path, ranks: int, *args: str) -> list[float]:
    (folder / "sitecustomize.py").write_text(BLOCKED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(folder / "train.py"),
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(folder))
    done = subprocess.run([*command, *args], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return losses(done.stdout)


def forked(ranks: Ranks, folder: Path, size: int, *args: str) -> list[float]:
    ended = launch(ranks, folder / "train.py", size, *args, without="autopar")
    assert not any(each.status for each in ended), ended
    return losses(ended[0].stdout)


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]


def reference(graph, state, batch, steps: int, lr: float) -> list[float]:  # type: ignore[no-untyped-def]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = run_graph(graph, leaves, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("everything", "real"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_exported_folder_trains_without_autopar(everything: bool, real: bool, tmp_path: Path, ranks: Ranks) -> None:
    """Also in micro-batches, with parts that run again and others on the host, and the state on pairs; torchrun is slow."""
    graph = gpt2_graph(2, 16, 4, 32, 8, 8, dtype="float64")
    candidate = drawn_candidate(graph, mesh_of(dp=2, tp=2), 1, zero=3, wild=0.2)
    if everything:
        candidate = drawn_candidate(graph, mesh_of(dp=4), 1, zero=3, wild=0.0)
        candidate = with_replays(graph, replace(candidate, micro_batches=2, zero_group=2), 1)
    lowered = lower(graph, candidate)
    batch = random_batch(lowered)
    assert {tensor.shape[0] for tensor in batch.values()} == {graph.batch}
    state = make_state(graph)
    words = ("zero_group = 2", "again.offload(", "again(F.", "micro_batches = 2")
    assert all((word in render(lowered)) == everything for word in words)
    folder = export(lowered, "{}", tmp_path / "out", weights=state, batch=batch, learning_rate=1e-2)
    found = (torchrun if real else partial(forked, ranks))(folder, 4, "--steps", "3")
    assert found == pytest.approx(reference(graph, state, batch, 3, 1e-2), rel=1e-9)


def test_random_batch_fits_the_tables() -> None:
    graph = gpt2_graph(1, 16, 4, 32, 8, 8)
    lowered = lower(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 1))
    assert global_inputs(lowered) == {"input_ids": (8, 8), "labels": (8, 8)}
    batch = random_batch(lowered)
    assert set(batch) == {"input_ids", "labels"}
    assert all(int(tensor.min()) >= 0 and 16 < int(tensor.max()) < 32 for tensor in batch.values())


def test_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    graph = gpt2_graph(1, 16, 4, 32, 8, 8)
    lowered = lower(graph, drawn_candidate(graph, mesh_of(dp=2), 0, wild=0))
    export(lowered, "{}", tmp_path, weights=make_state(graph))
    (tmp_path / "mine.txt").write_text("kept")
    export(lowered, "{}", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"program.py", "plan.json", "runtime", "train.py", "README.md", "batch.pt", "mine.txt"}
    assert "autopar.runtime" not in (tmp_path / "program.py").read_text()
