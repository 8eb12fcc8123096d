"""A job that goes on when processes die, and when their number changes: it plans for those that are there, loads the last
checkpoint, and goes on with the data where it was. The losses are those of one process.

``torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/elastic.py``
on each of up to four nodes; ``torchrun --standalone --nproc-per-node 4 --max-restarts 100 examples/elastic.py`` on one. A signal
USR1 makes it save and end.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.plan_inputs import plan_folder
from autopar.runtime.device.mesh import shut_down

BATCH, SEQUENCE, HIDDEN, LAYERS, VOCABULARY = 16, 32, 32, 3, 256


class Mixer(nn.Module):
    """Mixes the bytes so far, then each byte's features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gates, self.values = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        x = x + torch.sigmoid(self.gates(h)) * torch.cumsum(self.values(h), 1) / SEQUENCE
        return x + self.down(F.gelu(self.up(x)))


class ByteModel(nn.Module):
    """Bytes in, mean cross entropy of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())
        return loss


def make_model(dtype: torch.dtype) -> ByteModel:
    """The same weights in every process."""
    torch.manual_seed(0)
    return ByteModel().to(dtype)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def corpus() -> torch.Tensor:
    """Modules of this machine's standard library as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))
    return torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def global_batch(text: torch.Tensor, seed: int, step: int) -> dict[str, torch.Tensor]:
    """The batch of a step, which depends on nothing else: neither on the steps before, nor on the number of processes."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=generator)
    windows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
    return {"text": windows[:, :-1].contiguous(), "following": windows[:, 1:].contiguous()}


def plan_ahead(clusters: list[str], dtype: str) -> None:
    """Another process plans, beside the training, for clusters that may come, and puts the plans where `parallelize` looks."""
    subprocess.Popen(["nice", sys.executable, __file__, "--dtype", dtype, "--plan-for", *clusters], start_new_session=True)


class StopSignal:
    """Whether one of the ranks was sent USR1, as Slurm does before the time limit."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "came", True))

    def agreed(self, device: torch.device) -> bool:
        """Alike on all ranks, which call it together."""
        came = torch.tensor(float(self.came), device=device)
        torch.distributed.all_reduce(came, op=torch.distributed.ReduceOp.MAX)
        return bool(came)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="of all nodes")
    parser.add_argument("--cluster", default="local", help="dgx-h100, ...: as many devices as there are processes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--expect", nargs="*", default=[], help="clusters that may come (local:2 ...), planned for meanwhile")
    parser.add_argument("--plan-for", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text, model = corpus(), make_model(getattr(torch, arguments.dtype))
    if arguments.plan_for:
        for cluster in arguments.plan_for:
            autopar.plan(model, cluster, global_batch(text, 0, 0), cache=plan_folder())
        return

    stop = StopSignal()
    parallel = autopar.parallelize(model, arguments.cluster, global_batch(text, 0, 0))
    optimizer = make_optimizer(parallel)
    resumed = parallel.load(arguments.folder, optimizer)
    first, seed = (resumed.step, resumed.extra["seed"]) if resumed else (0, 1)
    log = torch.distributed.get_rank() == 0
    if log:
        print(f"{parallel.plan.describe()}: from step {first}", flush=True)
        if arguments.expect:
            plan_ahead(arguments.expect, arguments.dtype)
    done = first
    for step in range(first, arguments.steps):
        loss = parallel(**global_batch(text, seed, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if log:
            print(f"step {step} loss {loss.item()!r}", flush=True)
        done, stopping = step + 1, stop.agreed(loss.device)
        if stopping or done == arguments.steps:
            parallel.save(arguments.folder, optimizer, step=done, extra={"seed": seed}, keep=3)
        elif done % arguments.every == 0:  # written by a thread; the next save tells of it if it failed
            parallel.save(arguments.folder, optimizer, step=done, extra={"seed": seed}, keep=3, asynchronous=True)
        if stopping:
            break
    shut_down()
    if log and done == arguments.steps:
        (arguments.folder / "finished").touch()  # after the last checkpoint is whole, on one rank


if __name__ == "__main__":
    main()
