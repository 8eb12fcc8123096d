"""The main job on real text: a byte-level GPT learns the source of Python's standard library on 4 local processes.

``python examples/train_gpt.py`` plans, trains under torchrun, trains the same model on one process, and compares. The model is
plain torch; the training loop is the one that you would write for one device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.runtime.device.mesh import shut_down

PROCESSES, BATCH, SEQUENCE = 4, 16, 128
HIDDEN, HEADS, LAYERS, VOCABULARY = 192, 4, 4, 256


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes in, mean cross entropy of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def make_model() -> GPT:
    """The same weights in every process."""
    torch.manual_seed(0)
    return GPT()


def corpus() -> torch.Tensor:
    """The modules of this machine's standard library, one after the other, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The same random windows in every process."""
    text, generator = corpus(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,), generator=generator)
        windows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
        yield {"text": windows[:, :-1].contiguous(), "following": windows[:, 1:].contiguous()}


def train(model: nn.Module, steps: int, say: Callable[[str], None]) -> tuple[list[float], float]:
    """The user's loop. Losses, and the median seconds of a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for step, batch in enumerate(batches(steps)):
        start = time.perf_counter()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if step % 5 == 0 or step == steps - 1:
            say(f"  step {step:3d}  loss {losses[-1]:.4f}  {times[-1] * 1000:.0f} ms")
    return losses, sorted(times[1:] or times)[len(times[1:]) // 2]


def worker(plan: str, steps: int, result: str) -> None:
    """One of the processes that torchrun starts."""
    torch.set_num_threads(1)
    parallel = autopar.parallelize(make_model(), f"local:{PROCESSES}", next(batches(1)), plan=plan)
    first = torch.distributed.get_rank() == 0
    losses, seconds = train(parallel, steps, lambda line: print(line, flush=True) if first else None)
    if first:
        Path(result).write_text(json.dumps({"losses": losses, "seconds": seconds}))
    shut_down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--short", action="store_true", help="a few steps, for CI")
    parser.add_argument("--force", default="", help="tp=4, dp=2,tp=2,zero=3, ...: instead of the solver's own choice")
    parser.add_argument("--worker", nargs=3, metavar=("PLAN", "STEPS", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker[0], int(arguments.worker[1]), arguments.worker[2])
    steps = 6 if arguments.short else 25

    print(f"1. planning for {PROCESSES} processes on this machine", flush=True)
    example = next(batches(1))
    plan = autopar.plan(
        make_model(),
        f"local:{PROCESSES}",
        example,
        force=arguments.force,
        seq=SEQUENCE,
        progress=lambda line: print(f"  {line}", flush=True),
    )
    print(f"  chosen: {plan.describe()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        print(f"2. training {steps} steps on {PROCESSES} processes", flush=True)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        subprocess.run([*torchrun, __file__, "--worker", f"{folder}/plan.json", str(steps), f"{folder}/result.json"], check=True)
        result = json.loads(Path(f"{folder}/result.json").read_text())
    print(f"3. training {steps} steps on one process", flush=True)
    losses, seconds = train(make_model(), steps, lambda line: print(line, flush=True))

    worst = report(plan, result, losses, seconds)
    if worst > 1e-3:
        sys.exit(f"the losses differ by up to {worst:.1e}: this is a bug")


def report(plan: autopar.Plan, result: dict[str, list[float]], losses: list[float], seconds: float) -> float:
    """Prints the table; the largest relative difference of the losses."""
    predicted = plan.document.predicted.step_seconds
    print(f"\nplan        {plan.describe()}")
    print(f"step time   predicted {predicted * 1000 if predicted else 0:.0f} ms, measured {result['seconds'] * 1000:.0f} ms"
          f" on {PROCESSES} processes; {seconds * 1000:.0f} ms on one")  # fmt: skip
    print("\nstep   loss of the plan   loss of one process   relative difference")
    worst = 0.0
    for step, (ours, single) in enumerate(zip(result["losses"], losses, strict=True)):
        difference = abs(ours - single) / abs(single)
        worst = max(worst, difference)
        print(f"{step:4d} {ours:18.6f} {single:21.6f} {difference:21.1e}")
    return worst


if __name__ == "__main__":
    main()
