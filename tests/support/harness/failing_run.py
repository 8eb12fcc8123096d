"""A run of four ranks, as a script of the user's, in which one of them dies, stops or fails at a given moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from support.harness.rank_pool import RankPool

CULPRIT, WORLD = 2, 4
PROGRAMS = {"dp=4": ({"dp": 4}, 0), "dp=4,zero=3": ({"dp": 4}, 3), "dp=2,tp=2": ({"dp": 2, "tp": 2}, 0)}
PIPELINE = "pp=4"
MOMENTS = ("planning", "forward", "backward", "saving")


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its status, seconds after the culprit struck, and what it wrote to stderr."""

    status: int | None
    seconds: float
    text: str


def failing_run(ranks: RankPool, folder: Path, plan: str, how: str, moment: str, patience: float) -> dict[int, Outcome]:
    """The outcomes of all ranks but the culprit. A rank that still runs after twice the patience has the status None."""
    forks = [
        ranks.template.fork("support.harness.failing_run:run", str(folder), rank, plan, how, moment, patience, environment={})
        for rank in range(WORLD)
    ]
    begun, struck = monotonic(), folder / "struck"
    while not struck.exists() and monotonic() < begun + 60:
        sleep(0.02)
    since, ended = monotonic(), dict[int, tuple[int, float]]()
    while len(ended) < WORLD - 1 and monotonic() < since + 2 * patience:
        for rank, fork in enumerate(forks):
            if rank != CULPRIT and rank not in ended and (status := fork.poll()) is not None:
                ended[rank] = status, monotonic() - since
        sleep(0.05)
    for fork in forks:
        fork.kill()
    assert struck.exists(), f"the culprit never struck: {(folder / f'{CULPRIT}').read_text()}"
    others = [rank for rank in range(WORLD) if rank != CULPRIT]
    texts = {rank: (folder / f"{rank}").read_text() for rank in others}
    never: tuple[int | None, float] = None, float("inf")
    found = {rank: ended.get(rank, never) for rank in others}
    return {rank: Outcome(status, seconds, texts[rank]) for rank, (status, seconds) in found.items()}


def run(folder: str, rank: int, plan: str, how: str, moment: str, patience: float) -> None:
    """On a rank."""
    import torch.distributed as dist

    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)

    def strike(*_: Any) -> None:
        time.sleep(min(1.0, patience / 10))  # a beat tells where this rank is
        Path(folder, "struck").touch()
        if how == "raises":
            raise ValueError("on purpose")
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP, "terminated": signal.SIGTERM}[how])

    if moment == "planning":
        _plan(strike if rank == CULPRIT else lambda: time.sleep(60), patience)
    _train(_parallel(plan, patience), strike if rank == CULPRIT else None, moment)
    sys.exit(0)


def _plan(instead: Callable[[], None], patience: float) -> None:
    """`parallelize`, in which the search of rank 0 takes long, and the culprit strikes meanwhile."""
    import torch
    from torch import nn

    from autopar import api

    waiting = api._on_first_rank
    rank = torch.distributed.get_rank()
    if rank == CULPRIT:
        api._on_first_rank = lambda make: instead()  # type: ignore[assignment,return-value]
    else:
        api._on_first_rank = lambda make: waiting(instead)  # type: ignore[arg-type]
    api.parallelize(nn.Linear(4, 4), "local:4", {"input": torch.zeros(4, 4)}, patience_seconds=patience)


def _parallel(plan: str, patience: float) -> Any:
    from autopar.runtime.parallel import Parallel
    from support.harness.training_loop import parallel_model
    from support.models import handwritten_pipeline, handwritten_program

    if plan == PIPELINE:
        text = handwritten_pipeline.pipeline_text(handwritten_pipeline.built_schedule("1f1b", 4, 4), 4)
        return parallel_model(text, handwritten_pipeline.model().state_dict(), patience_seconds=patience)
    model = handwritten_program.Model().double()
    return Parallel(handwritten_program.make(*PROGRAMS[plan]), model.state_dict(), patience_seconds=patience)


def _train(parallel: Any, strike: Callable[..., None] | None, moment: str) -> None:
    """One good step, one in which the culprit strikes, and the saving of the state after it."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    batch = {name: torch.randint(1, 24, (16, 6), generator=torch.Generator().manual_seed(0)) for name in ("ids", "labels")}
    for step in (1, 2):
        if step == 2 and strike is not None:
            first, *_, block = parallel.program.blocks()
            if moment == "forward":
                block.register_forward_pre_hook(strike)
            if moment == "backward":
                first.register_forward_hook(lambda _, __, result: result.register_hook(strike) and None)
        parallel(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    if strike is not None:
        strike()
    dist.barrier()
