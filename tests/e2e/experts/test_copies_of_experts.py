"""Averages of the weights (EMA) of a model whose experts change places: a copy takes the places that the model has then, and one
that stays behind is a warning."""

from __future__ import annotations

import warnings

import torch
from e2e.experts.test_rebalanced_experts import SKEWED, routed, routed_batch_of, routed_parallel
from support.harness.comparison import different_tensors
from support.harness.rank_pool import RankPool
from torch.optim.swa_utils import AveragedModel


def averages_on_rank() -> list[str]:
    """On a rank: an average that begins before the experts move and one that begins after it; what was warned of."""
    plain, parallel = routed(), routed_parallel(routed())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, parallel)]
    early = [AveragedModel(each) for each in (plain, parallel)]
    late: list[AveragedModel] = []
    said: list[str] = []
    for number in range(3):
        for model, optimizer in zip((plain, parallel), optimizers, strict=True):
            optimizer.zero_grad()
            model(**routed_batch_of(8 + number)).backward()
            optimizer.step()
        if number == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for model, optimizer in ((parallel, optimizers[1]), (early[1].module, None)):
                    model.rebalance_experts([SKEWED[0]], optimizer, steps=None)
                    said.append(" ".join(str(each.message) for each in caught if "copy" in str(each.message)))
            late = [AveragedModel(each) for each in (plain, parallel)]
        for model, *copies in zip((plain, parallel), early, late, strict=True):
            for each in copies:
                each.update_parameters(model)
    for expected, found in (early, late):
        wrong = different_tensors("average", found.module.full_state(), dict(expected.module.named_parameters()), 1e-9)
        assert not wrong, wrong[:5]
    return said


def test_averages_of_rebalanced_experts(ranks: RankPool) -> None:
    for first, both in ranks.run(averages_on_rank, timeout=120):
        assert "rebalance_experts with the same loads" in first and both == first, "the copy moved too"
