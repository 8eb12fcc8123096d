"""What an asynchronous save costs the steps beside it: rounds of steps with one and without, in pairs, on two local processes.

    python tests/benchmarks/bench_async_save.py [--width 1024] [--layers 8] [--every 20] [--pairs 5]

Prints for each pair the ratio of the seconds by the clock and of the seconds of the processor (which other programs on the
machine do not change), and how long the call of `parallel.save` held the loop. With as many ranks as cores the thread that hashes
and writes takes its seconds from the steps; with a core more, or on GPUs, only the call and the copy do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.runtime.device.mesh import shut_down

WORLD = 2


def make(width: int, layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(256, width)


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model, x = make(arguments.width, arguments.layers)
    parallel = autopar.parallelize(model, "local", (x,), force="dp=2,zero=3")
    optimizer = torch.optim.AdamW(parallel.parameters())
    folder = Path(arguments.folder)

    def steps(save: int) -> tuple[float, float, float, float]:
        """Seconds by the clock, of the processor, of the call of save; and of the processor after the last step."""
        torch.distributed.barrier()
        begun, used, held = time.perf_counter(), time.process_time(), 0.0
        pending = None
        if save:
            pending = parallel.save(folder, optimizer, step=save, keep=1, asynchronous=True)
            held = time.perf_counter() - begun
        for _ in range(arguments.every):
            parallel(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        clock, processor = time.perf_counter() - begun, time.process_time() - used
        if pending is not None:
            pending.wait()
        return clock, processor, held, time.process_time() - used - processor

    first = torch.distributed.get_rank() == 0
    steps(0), steps(1)
    size = sum(p.numel() for p in parallel.parameters()) * 3 * 4 / 1e9
    if first:
        cores = len(os.sched_getaffinity(0))
        print(f"{size:.2f} GB of state on {WORLD} processes, {cores} cores, a save each {arguments.every} steps")
        print("pair   step without   with   clock   processor   save() held   after the steps")
    ratios: list[tuple[float, float]] = []
    for pair in range(arguments.pairs):
        order = (0, pair + 2) if pair % 2 else (pair + 2, 0)
        found = {bool(save): steps(save) for save in order}
        plain, saving = found[False], found[True]
        ratios.append((saving[0] / plain[0], (saving[1] + saving[3]) / plain[1]))
        if first:
            each = 1e3 / arguments.every
            print(f"{pair:4d} {plain[0] * each:11.1f} ms {saving[0] * each:6.1f} {ratios[-1][0]:7.3f} {ratios[-1][1]:11.3f} "
                  f"{saving[2] * 1e3:10.0f} ms {saving[3]:9.2f} s", flush=True)  # fmt: skip
    if first:
        clock, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"median ratio: clock {clock:.3f}, processor {processor:.3f}")
    shut_down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return worker(arguments)
    folder = tempfile.mkdtemp()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), __file__]
    try:
        subprocess.run([*torchrun, *sys.argv[1:], "--folder", folder], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
