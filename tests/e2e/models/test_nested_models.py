"""Models whose equal layers lie inside of others equal one process, loops of their programs included."""

from __future__ import annotations

import pytest
import torch
from support.harness.end_to_end import check_programs, plan, prepare_model, program
from support.harness.rank_pool import RankPool
from support.models.nested_models import nested_inputs, nested_model

FORCES = {"dp=2,tp=2": {"dp": 2, "tp": 2, "zero": 0}, "dp=2,tp=2,zero=3": {"dp": 2, "tp": 2, "zero": 3}}


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("resnet", "unet")), "swin", "shared"])
def test_equals_one_process(kind: str, ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = nested_model(kind, 4).double()
    batch = {name: x.double() if x.is_floating_point() else x for name, x in nested_inputs(kind, 8).items()}
    case = prepare_model(kind, model, batch)
    texts = [program(case, plan(case, force)) for force in FORCES.values()]
    assert all("for " in text.partition("def forward")[2] for text in texts)
    check_programs(ranks, case, texts, FORCES)
