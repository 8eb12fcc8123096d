"""A program without variants (an exported one) refuses to train what was frozen when its plan was made."""

from __future__ import annotations

from typing import Any

from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.models.habit_model import batch, net_of
from torch import Tensor

import autopar
from autopar.program.build import program_text


def refused(text: str, state: dict[str, Tensor]) -> str:
    parallel: Any = parallel_model(text, state)
    parallel(**batch()).backward()
    next(p for name, p in parallel.named_parameters() if name.startswith("layers.1.")).requires_grad_(True)
    return refusal(lambda: parallel(**batch()))


def test_an_exported_program_refuses_to_train_what_was_frozen(ranks: RankPool) -> None:
    model = net_of("frozen 0 1")
    plan = autopar.plan(model, "local:2", batch(), force="dp=2,zero=3")
    state = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for said in ranks.run(refused, program_text(plan.graph, plan.candidate), state, world=2):
        assert "call requires_grad_(True) before autopar.parallelize" in said
