"""A rank that is killed while a checkpoint is written: the others end, and the checkpoint before is the one that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.chain_model import model_and_batch
from support.harness.failing_run import PLANS, Fault, failing_runs
from support.harness.rank_pool import RankPool

from autopar.runtime.checkpoint.entry import load_checkpoint


def check(ranks: RankPool, folder: Path, faults: list[Fault], plans: Callable[[str], str]) -> None:
    for number, (fault, outcomes) in enumerate(failing_runs(ranks, folder, faults, plans, 10.0).items()):
        for rank, outcome in outcomes.items():
            assert outcome.status and not outcome.left, f"{fault}: rank {rank}: {outcome.text}"
            if rank != fault.culprit:
                told = [line for line in outcome.text.splitlines() if f"rank {fault.culprit}" in line and "a checkpoint" in line]
                assert told, f"{fault}: rank {rank}: {outcome.text}"
        left = folder / str(number) / "checkpoints"
        assert sorted(path.name for path in left.iterdir()) == ["step_00000001", "step_00000002.tmp"], fault
        model, _ = model_and_batch()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = load_checkpoint(left, model)
        assert found is not None and found.step == 1 and found.extra == {"epoch": 1}
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_checkpoint_before_is_loaded(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    check(ranks, tmp_path, [Fault("dp=4,zero=3", "dies", "checkpoint"), Fault("pp=2,dp=2", "dies", "checkpoint", 0)], plans)


@pytest.mark.slow
def test_every_plan_and_rank(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    for plan in PLANS:
        folder = tmp_path / plan
        folder.mkdir()
        check(ranks, folder, [Fault(plan, "dies", "checkpoint", rank) for rank in range(4)], plans)
