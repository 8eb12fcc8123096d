"""A long run: a small transformer on ranks that trains on texts of changing lengths and batch sizes, saves (beside the training
too), loads and evaluates, while one process computes the same and the memory of each rank is looked at.

    PYTHONPATH=.:tests python tests/e2e/soak/soak_script.py --seconds 3600 --force dp=2,tp=2,zero=3 --folder /tmp/soak

prints what one process makes of the losses, and how memory grew. Steps depend on their number alone."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORLD, VOCABULARY, WIDTH, HEADS, DEPTH, BATCH = 4, 61, 32, 4, 2, 8
USUAL, LONGEST = (16, 20, 24, 32, 33, 40, 48, 64), 96
EVALUATE, SAVE, WINDOW, KEEP = 25, 20, 200, 2
"""Steps between two evaluations, two asynchronous saves, and two checkpoints from which one process goes on; how many others
are kept."""

Batch = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Tokens in, mean cross entropy of the next one out; in training with smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, following.flatten(), label_smoothing=0.1 if self.training else 0.0)


def make() -> tuple[Decoder, Any]:
    """The same weights in every process, and what makes their optimizer."""
    torch.manual_seed(0)
    return Decoder().double(), lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)


def drawn(step: int, kind: str = "train") -> Batch:
    """The batch of a step: mostly of some usual lengths, at times of any (so that more kinds of calls come than programs are
    kept), and at times the last one of an epoch, which divides over no data ranks. Each token follows from the two before it."""
    draw = random.Random(f"{kind} {step}")
    length = draw.choice(USUAL) if draw.random() < 0.9 else draw.randrange(8, LONGEST)
    batch = BATCH - 1 if step % 40 == 39 else BATCH
    generator = torch.Generator().manual_seed(draw.randrange(2**40))
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    for at in range(2, length + 1):
        told = (3 * tokens[:, at - 1] + 5 * tokens[:, at - 2] + 1) % VOCABULARY
        tokens[:, at] = torch.where(torch.rand(batch, generator=generator) < 0.2, tokens[:, at], told)
    return {"text": tokens[:, :-1].contiguous(), "following": tokens[:, 1:].contiguous()}


def train(model: nn.Module, optimizer: Any, first: int) -> Iterator[tuple[int, float, float | None]]:
    """After each step its number, its loss, and in some steps the loss of an evaluation."""
    for step in range(first, 10**9):
        loss = model(**drawn(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluated = None
        if step % EVALUATE == EVALUATE - 1:
            model.eval()
            with torch.no_grad():
                evaluated = model(**drawn(step, "evaluation")).item()
            model.train()
        yield step, loss.item(), evaluated


# -- a rank


def looked_at() -> dict[str, float]:
    """The memory of this process: bytes that are its own or shared, and live tensors, objects, threads and files."""
    gc.collect()
    tensors = {each.data_ptr(): each.nbytes for each in gc.get_objects() if type(each) is Tensor and each.device.type == "cpu"}
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "rss": resident, "tensors": len(tensors), "tensor_bytes": sum(tensors.values()), "objects": len(gc.get_objects()),
        "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def rank(seconds: float, force: str, folder: Path) -> None:
    import autopar
    from autopar.runtime.device.mesh import shut_down

    torch.set_num_threads(1)
    model, optimizer_of = make()
    parallel = autopar.parallelize(
        model, f"local:{WORLD}", drawn(0), force=force, patience_seconds=3600.0, cache=False, check_every=100
    )  # fmt: skip
    optimizer, own = optimizer_of(parallel), torch.distributed.get_rank()
    with open(folder / f"rank{own}.jsonl", "w", buffering=1) as log:
        steps(parallel, optimizer, seconds, folder, log)
    shut_down()


def steps(parallel: Any, optimizer: Any, seconds: float, folder: Path, log: TextIO) -> None:
    """Until they took so long; what they were, a line each."""
    begun = time.monotonic()
    for step, loss, evaluated in train(parallel, optimizer, 0):
        said: dict[str, Any] = {"step": step, "loss": loss, "evaluated": evaluated, "seconds": time.monotonic() - begun}
        done = step + 1
        if done % WINDOW == 0:
            parallel.save(folder / "windows", optimizer, step=done, extra={"step": done})
            found = parallel.load(folder / "kept", optimizer, step=(done // SAVE - 1) * SAVE)  # waits for the last save
            assert found is not None and found.step < done
            found = parallel.load(folder / "windows", optimizer, step=done)
            assert found is not None and found.extra == {"step": done}
            said |= looked_at()
        elif done % SAVE == 0:
            parallel.save(folder / "kept", optimizer, step=done, extra={"step": done}, keep=KEEP, asynchronous=True)
        log.write(json.dumps(said) + "\n")
        if done % WINDOW == 0:
            ending = torch.tensor(float(time.monotonic() - begun > seconds))
            torch.distributed.all_reduce(ending, torch.distributed.ReduceOp.MAX)
            if ending:
                break


# -- the one process


class Alone:
    """One process that computes the same, from the beginning on, never interrupted, and beside that from each checkpoint on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model, optimizer_of = make()
        self.steps = train(model, optimizer_of(model), 0)
        self.done, self.drift, self.worst = 0, [], 0.0
        self.following = 0

    def told(self) -> list[dict[str, Any]]:
        file = self.folder / "rank0.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def follow(self) -> bool:
        """Computes the next window of steps, where the ranks have. Whether they had."""
        told = self.told()
        if len(told) < self.following + WINDOW:
            return False
        window = told[self.following : self.following + WINDOW]
        self.drift.append(max(difference(each, next(self.steps)) for each in window))
        model, optimizer_of = make()
        optimizer = optimizer_of(model)
        if self.following:
            import autopar

            state = random.getstate(), torch.get_rng_state()
            found = autopar.load_checkpoint(self.folder / "windows", model, optimizer, step=self.following)
            assert found is not None and found.step == self.following
            random.setstate(state[0]), torch.set_rng_state(state[1])
        again = train(model, optimizer, self.following)
        self.worst = max(self.worst, *(difference(each, next(again)) for each in window))
        self.following += WINDOW
        return True


def difference(told: dict[str, Any], computed: tuple[int, float, float | None]) -> float:
    """Of the losses of a step and of its evaluation, relative."""
    step, *losses = computed
    assert told["step"] == step
    pairs = zip((told["loss"], told["evaluated"]), losses, strict=True)
    return max(abs(mine - other) / abs(other) for mine, other in pairs if mine is not None and other is not None)


def growth(folder: Path, warm: float) -> dict[str, dict[str, tuple[float, float]]]:
    """Of each rank what was looked at: after the share `warm` of the seconds, and at the end; medians of a tenth of them each."""
    out = {}
    for number in range(WORLD):
        lines = [json.loads(line) for line in (folder / f"rank{number}.jsonl").read_text().splitlines()]
        looks = [each for each in lines if "rss" in each]
        later = [each for each in looks if each["seconds"] >= warm * looks[-1]["seconds"]]
        some = max(1, len(later) // 8)
        middle = lambda part, key: sorted(each[key] for each in part)[len(part) // 2]  # noqa: E731
        keys = ("rss", "tensors", "tensor_bytes", "objects", "threads", "files")
        out[f"rank {number}"] = {key: (middle(later[:some], key), middle(later[-some:], key)) for key in keys}
    return out


def soak(seconds: float, force: str, folder: Path) -> Alone:
    """Runs the ranks, and one process beside them. AssertionError where a rank fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    words = [sys.executable, __file__, "--seconds", str(seconds), "--force", force, "--folder", str(folder)]
    ranks = []
    for number in range(WORLD):
        with open(folder / f"rank{number}.out", "wb") as output:
            own = shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(subprocess.Popen(words, env=own, stdout=output, stderr=output))
    alone = Alone(folder)
    torch.set_num_threads(1)
    try:
        while any(each.poll() is None for each in ranks):
            failed = [number for number, each in enumerate(ranks) if each.poll()]
            assert not failed, (folder / f"rank{failed[0]}.out").read_text()[-4000:]
            if not alone.follow():
                time.sleep(0.2)
        while alone.follow():
            pass
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert not any(each.returncode for each in ranks), (folder / "rank0.out").read_text()[-4000:]
    return alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--force", default="dp=2,tp=2,zero=3")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--warm", type=float, default=0.25)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return rank(arguments.seconds, arguments.force, arguments.folder)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    alone = soak(arguments.seconds, arguments.force, folder)
    print(f"{alone.following} steps; from each checkpoint on {alone.worst:.1e}, never interrupted {max(alone.drift):.1e}")
    for name, found in growth(folder, arguments.warm).items():
        print(name, {key: f"{before:g} -> {after:g} ({after / before - 1:+.2%})" for key, (before, after) in found.items()})


if __name__ == "__main__":
    main()
