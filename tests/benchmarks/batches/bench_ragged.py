"""Seconds of a ragged training step (7 examples) beside a fixed one (8), of GPT-2 with 8 layers on 4 local processes:

    torchrun --nproc-per-node 4 tests/benchmarks/batches/bench_ragged.py dp=2,tp=2,zero=3 [rounds]

Both programs run in turn, after a warm up; what is shown is the median of all rounds, and the ratio.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.runtime.device.mesh import shut_down

SIZES = (8, 7)
LENGTH = 64


def main(force: str, rounds: int) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=128, n_head=4, vocab_size=512, n_positions=256)).train()

    def batch(size: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 512, (size, LENGTH))
        return {"input_ids": ids, "labels": ids}

    parallel = autopar.parallelize(model, "local:4", batch(8), force=force, cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    taken: dict[int, list[float]] = {size: [] for size in SIZES}
    for number in range(rounds + 3):
        for size in SIZES if number % 2 else SIZES[::-1]:
            given = batch(size)
            dist.barrier()
            start = time.perf_counter()
            parallel(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= 3:
                taken[size].append(time.perf_counter() - start)
    if rank == 0:
        fixed, ragged = (statistics.median(taken[size]) for size in SIZES)
        print(f"{force}: {fixed * 1e3:.1f} ms fixed, {ragged * 1e3:.1f} ms ragged, ratio {ragged / fixed:.2f}", flush=True)
    shut_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 30)
