"""The dry run of a plan with Muon: its state is the predicted one, of matrices and of the rest, and the exchange is there."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.dryrun.run import DryRun, dry_run
from autopar.ir.plan_file.plan_file import load_plan


class Words(nn.Module):
    """A table of words and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 64)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((64, 256), (256, 64)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def dry(path: str) -> DryRun:
    logging.disable(logging.WARNING)
    return dry_run(load_plan(path), 0)


@pytest.mark.parametrize("force", ["dp=8,zero=0", "dp=4,tp=2,zero=1"])
def test_state_is_the_predicted_one_and_the_peak_no_more(force: str, ranks: RankPool, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        plan = autopar.plan(Words(), "dgx-h100:1", {"ids": torch.zeros(16, 32, dtype=torch.int64)}, force=force, optimizer="muon")
    predicted = evaluate(plan.graph, plan.candidate, Cluster.parse("dgx-h100:1"), "muon").stage_memory[0]
    plan.save(str(tmp_path / "plan.json"))
    found = ranks.run_alone(dry, str(tmp_path / "plan.json"))
    assert found.memory["optimizer"] == pytest.approx(dict(predicted.table)["optimizer"], rel=0.04)
    assert found.peak_bytes <= 1.03 * predicted.tensor_bytes  # Muon updates matrix by matrix, AdamW all parameters at once
    exchanges = [each.count for each in found.collectives if each.kind == "all-to-all" and each.axis in ("dp", "all")]
    assert exchanges == [2]
