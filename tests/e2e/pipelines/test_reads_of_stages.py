"""Values that a script reads or saves of the parts of other ranks."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}


def model(force: str) -> Any:
    torch.manual_seed(0)
    return autopar.parallelize(Net(), f"local:{dist.get_world_size()}", batch(), force=force, cache=False)


def other_values() -> str:
    """What the next call says, where rank 0 reads another value than rank 1, whose bytes are as many."""
    parallel: Any = autopar.parallelize(Net(), "local:2", batch(), force="pp=2,dp=1", cache=False)
    total = parallel.body[0].bias.detach().sum()
    (total if dist.get_rank() else (total > 0).int()).item()
    return refusal(lambda: parallel(**batch()))


def test_ranks_that_read_other_values_are_refused(ranks: RankPool) -> None:
    for line in ranks.run(other_values, world=2):
        assert "has made 1 reads of values" in line and "(pp=1, dp=0) others, and a rank may" in line, line
        assert "take p.grad.norm().item() out of `if rank == 0:`" in line


def warnings_of_saves(force: str, folder: str) -> list[int]:
    """How often each save warns: of parameters, copied or not, and of an optimizer's state; then what is right."""
    parallel: Any = autopar.parallelize(Net(), "local:2", batch(), force=force, cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel(**batch()).backward()
    optimizer.step()
    full = parallel.full_state()
    saves: list[Callable[[], object]] = [
        lambda: torch.save({name: each.detach().cpu().clone() for name, each in parallel.named_parameters()}, io.BytesIO()),
        lambda: torch.save(parallel.state_dict(), io.BytesIO()),
        lambda: torch.save(optimizer.state_dict(), io.BytesIO()),
        lambda: torch.save(full, io.BytesIO()),
        lambda: copy.deepcopy(optimizer.state_dict()),
        lambda: dcp.save(parallel.state_dict(), checkpoint_id=folder),
        lambda: parallel.save(f"{folder}/whole", optimizer, step=1),
    ]
    counts = []
    for save in saves:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            save()
        assert all(each.filename == __file__ and "full_state(), which every rank" in str(each.message) for each in caught), caught
        counts.append(len(caught))
    return counts


@pytest.mark.parametrize("force", ["pp=2,dp=1", "dp=2,zero=3"])
def test_saves_of_a_rank_alone_say_what_is_lost(ranks: RankPool, tmp_path: Path, force: str) -> None:
    assert ranks.run(warnings_of_saves, force, str(tmp_path), world=2) == [[1, 1, 1, 0, 0, 0, 0]] * 2
