"""Damaged checkpoints of two ranks: both pass over them alike, and load the one before, whole."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train


def damaged(content: bytes, draw: random.Random) -> bytes | None:
    """None: the file is missing."""
    place = draw.randrange(len(content))
    changed = content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]
    return draw.choice([None, b"", content[:place], content[place + 1 :], content + b"\0", changed, changed])


def loads(text: str, state: Any, batch: Any, folder: str, count: int) -> list[str]:
    """On a rank: what was wrong."""
    import torch.distributed as dist

    parallel = parallel_model(text, state)
    optimizer, first, wrong = torch.optim.AdamW(parallel.parameters()), dist.get_rank() == 0, []
    train(parallel, [batch], optimizer)
    parallel.save(folder, optimizer, step=1, extra="one")
    whole = parallel.full_state()
    train(parallel, [batch], optimizer)
    path = parallel.save(folder, optimizer, step=2, extra="two").wait()
    draw = random.Random(3)
    for number in range(count):
        file = path / draw.choice(("manifest.json", "objects.pt", "rank_00000.safetensors", "rank_00001.safetensors"))
        content = file.read_bytes()
        other = damaged(content, draw)
        dist.barrier()
        if first:
            file.unlink() if other is None else file.write_bytes(other)
        dist.barrier()
        found = parallel.load(folder, optimizer)
        now = parallel.full_state()
        if found.step != 1 or found.extra != "one" or any(not torch.equal(value, now[name]) for name, value in whole.items()):
            wrong.append(f"{number}: {file.name}: {found}")
        dist.barrier()
        if first:
            file.write_bytes(content)
        dist.barrier()
    return [*wrong, *(["the whole one"] if parallel.load(folder, optimizer).step != 2 else [])]


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_both_load_the_one_before(count: int, ranks: RankPool, tmp_path: Path) -> None:
    from support.chain_model import model_and_batch
    from support.harness.failing_run import PLANS

    import autopar
    from autopar.program.build import program_text

    model, batch = model_and_batch()
    plan = autopar.plan(model, "local:2", batch, force=PLANS["dp=4,zero=3"])
    text = program_text(plan.graph, plan.candidate)
    folder, state = str(tmp_path / "checkpoints"), dict(model.state_dict())
    for wrong in ranks.run(loads, text, state, batch, folder, count, world=2, timeout=60.0 + count):
        assert not wrong, wrong[:5]
