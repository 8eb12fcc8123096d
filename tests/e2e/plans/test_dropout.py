"""Dropout in GPT-2: replicas draw the same masks, shards others; attention's too. Gradients of replicated parameters prove it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.end_to_end import plan, prepare_dropout, program
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model


def gradients(text: str, state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], names: tuple[str, ...]) -> Any:
    """On a rank, each seeded differently: local gradients of some parameters after a training step, and two evaluation losses."""
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    parallel = parallel_model(text, state)
    loss = parallel(**batch)
    loss.backward()
    found = {name: p.grad.to_local().clone() for name, p in parallel.named_parameters() if name in names}  # type: ignore[union-attr]
    parallel.eval()
    with torch.no_grad():
        return loss.item(), found, [parallel(**batch).item() for _ in range(2)]


@pytest.mark.parametrize("force", [{"dp": 4, "zero": 0}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 0}], ids=str)
def test_replicas_agree(force: dict[str, int], ranks: RankPool) -> None:
    case = prepare_dropout()
    text = program(case, plan(case, force))
    assert "C.attention_dropout(" in text and "C.dropout(" in text
    whole = ("transformer.h.0.ln_1.weight", "transformer.h.1.ln_2.bias", "transformer.ln_f.weight")
    found = ranks.run(gradients, text, case.state, case.batch, whole, timeout=120)
    for name in whole:
        for _, mine, _ in found[1:]:
            torch.testing.assert_close(mine[name], found[0][1][name], rtol=1e-9, atol=1e-12)
    expected = case.expected[0]
    assert found[0][2] == [pytest.approx(expected, rel=1e-6)] * 2
    assert found[0][0] != pytest.approx(expected, rel=1e-6)
