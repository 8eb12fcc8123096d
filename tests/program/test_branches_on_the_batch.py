"""A program says for which batches the model's forward takes its branches: without the model, other batches are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

from autopar.checker.certificate import certify
from autopar.passes.lower import lower
from autopar.planning import make_plan
from autopar.program.build import program_text
from autopar.program.export import export_program


class Wide(nn.Module):
    """Doubles the outputs of batches of at least six."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (2 * y if x.shape[0] >= 6 else y).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("force", ["dp=2", "pp=2,dp=1"])
def test_the_condition_is_part_of_the_proof(force: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Wide())
    plan = make_plan(model, "local:2", (torch.ones(8, 4),), force=force)
    text = program_text(plan.graph, plan.candidate)
    assert "return B_all - 6 >= 0" in text
    assert certify(text, plan.graph, plan.candidate).holds
    for wrong in (text.replace("B_all - 6 >= 0", "B_all - 6 > 0"), text.replace("def takes_batch", "def takes_batches")):
        assert not certify(wrong, plan.graph, plan.candidate).holds


def test_an_exported_program_refuses_other_branches(tmp_path: Path, ranks: RankPool) -> None:
    plan = make_plan(Wide(), "local:2", (torch.ones(8, 4),), force="dp=2")
    folder = export_program(lower(plan.graph, plan.candidate), "{}", tmp_path / "folder", weights=Wide().state_dict())
    for batch, word in ((8, ""), (4, "takes another branch")):
        torch.save({"x": torch.ones(batch, 4)}, folder / "batch.pt")
        ended = launch(ranks, folder / "train.py", 2, without="autopar")
        assert all(bool(each.status) == bool(word) and word in each.stderr for each in ended), ended
