"""Compiled blocks, with inductor: the same numbers."""

from __future__ import annotations

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import plan, prepare, program
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_steps


@pytest.mark.slow
@pytest.mark.parametrize("force", [{"dp": 2, "tp": 2, "zero": 3}], ids=["dp=2,tp=2,zero=3"])
def test_inductor_equals_one_process(force: dict[str, int], ranks: RankPool) -> None:
    prepared = prepare("llama", torch.float64)
    text = program(prepared, plan(prepared, force))
    (found,) = ranks.run(train_steps, [(text, prepared.state, prepared.batch, "inductor")], timeout=240)[0]
    loss, gradients, _ = found
    wrong = differences((loss, gradients, {}, {}), prepared.expected, 1e-9, parameters=False)
    assert not wrong, f"{wrong[:5]}\n{text}"
